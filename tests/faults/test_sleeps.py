"""What engines free while the trainer computes, in whole runs of two ranks and two engines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trace_event_format import Event, read_timeline, spans_of
from whole_runs import START_LIMIT_S, start_run, write_config

from umbra.runtime.cli.umbra_command import main
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 5
SETTINGS = [
    "pool.engine=embedded",
    "pool.engine_args={}",
    "pool.count=2",
    "model.dtype=float64",
    "reward.function=plain_rewards:distinct",
    "train.learning_rate=0.01",
    "train.loss=cispo",
    "train.micro_batches=1",
]
BOTH = "kv_cache, weights"


def trained(
    folder: Path,
    *settings: str,
    steps: int = STEPS,
    limit_s: float = START_LIMIT_S,
    **options: Any,
) -> tuple[list[float], list[Event], str]:
    """The rewards of the steps, the timeline, and the output."""
    with start_run(folder, *SETTINGS, f"train.steps={steps}", *settings, **options) as run:
        ended = run.wait(limit_s)
    assert ended.status == 0, ended.output
    path = folder / "all.json.gz"
    assert main(["trace", str(run.run_dir), "-o", str(path)]) == 0
    rewards = [row["rollout/reward_mean"] for row in read_metrics(run.run_dir / "metrics.jsonl")]
    assert len(rewards) == steps
    return rewards, read_timeline(path), ended.output


def freed(events: Sequence[Event], engine: str = "policy-0") -> list[str]:
    """The parts that an engine freed in each sleep."""
    sleeps = spans_of(events, engine, "sleep")
    return [sleep["args"]["tags"] for sleep in sleeps]


@pytest.fixture(scope="module")
def rewards_asleep(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run whose engines free all memory in every step."""
    folder = tmp_path_factory.mktemp("asleep")
    write_config(folder, assets)
    rewards, events, _ = trained(folder, "pool.sleep=all")
    assert freed(events) == [BOTH] * STEPS
    assert len(set(rewards)) > 1
    return rewards


@pytest.mark.parametrize("sleep", ["none", "kv_cache", "weights"])
def test_engines_free_what_is_asked_from_the_third_step_on(
    folder: Path, rewards_asleep: list[float], sleep: str
) -> None:
    rewards, events, _ = trained(folder, f"pool.sleep={sleep}")

    assert rewards == rewards_asleep
    for engine in ("policy-0", "policy-1"):
        later = [] if sleep == "none" else [sleep] * (STEPS - 2)
        assert freed(events, engine) == [BOTH, BOTH, *later]


COMPILES = ("pool.sleep=none", "train.compile=true")
TRACING_LIMIT_S = 300.0
"""From the start to the end of a run that traces its passes."""


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, ["train.kl_coef=0.1"]),
        (2, ["model.lora.rank=2", "train.loss=odd_losses:nan_in_step_2", "train.skip_nonfinite=1"]),
    ],
)
def test_a_run_that_compiles_while_engines_start_compiles_nothing_later_and_trains_the_same(
    folder: Path, assets: Path, num_ranks: int, settings: list[str]
) -> None:
    """The loss counts its calls."""
    found: list[list[dict[str, float]]] = []
    outputs: list[str] = []
    for name in ("WARMED", "UNWARMED"):
        own = folder / name
        own.mkdir()
        write_config(own, assets)
        *_, output = trained(
            own,
            *COMPILES,
            *settings,
            steps=2,
            limit_s=TRACING_LIMIT_S,
            num_ranks=num_ranks,
            program="compiling_trainer",
            environ={name: "1"},
        )
        rows = read_metrics(own / "run/metrics.jsonl")
        kept = ("train/", "rollout/reward", "rollout/tokens")
        found.append([{k: v for k, v in row.items() if k.startswith(kept)} for row in rows])
        outputs.append(output)

    warmed, unwarmed = outputs
    for rank in range(num_ranks):
        for step in (1, 2):
            (line,) = re.findall(rf"rank {rank} step {step}: (.*)", warmed)
            assert re.fullmatch(r"[1-9]\d* graphs, 0 more", line), warmed
        assert f"rank {rank} step 1: 0 graphs, " in unwarmed, unwarmed
    assert without_speed(found[0]) == without_speed(found[1])


def without_speed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.endswith("_per_s")} for row in rows]


@pytest.mark.parametrize("mode", ["hybrid", "standalone"])
def test_a_rank_without_memory_to_compile_ends_the_run_which_resumes_with_less(
    folder: Path, mode: str
) -> None:
    _, events, output = trained(
        folder,
        *COMPILES,
        f"pool.mode={mode}",
        limit_s=TRACING_LIMIT_S,
        program="compiling_trainer",
        environ={"SHORT": "1"},
        torchrun=("--standalone", "--max-restarts=1"),
    )

    assert "training ran out of memory" in output
    assert "step 1: 0 graphs" in output  # it did not try again
    if mode == "standalone":
        assert "from now on, nothing is compiled while engines start" in output
        return
    remedy = "engines sleep while the trainer computes, because this run ran out of memory;"
    assert output.count(remedy) == 1, output
    assert freed(events) == [BOTH] * STEPS


def test_an_awake_engine_that_dies_in_training_is_back_before_its_end(
    folder: Path, rewards_asleep: list[float]
) -> None:
    settings = ("pool.sleep=none", "train.loss=odd_losses:waits_in_step_3")
    with start_run(folder, *SETTINGS, f"train.steps={STEPS}", *settings) as run:
        waiting = folder / "waiting"
        run.wait_for("the third step", lambda: waiting.exists() or None, START_LIMIT_S)
        os.kill(run.pid_of("policy-0"), signal.SIGKILL)
        run.wait_for_restart("policy-0", START_LIMIT_S)
        (folder / "go_on").touch()
        ended = run.wait()

    assert ended.status == 0, ended.output
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    assert [row["rollout/reward_mean"] for row in rows] == rewards_asleep


def test_an_engine_that_is_new_while_weights_are_away_gets_them_with_adapters_merged_in(
    folder: Path,
) -> None:
    settings = ["pool.count=1", "train.offload=all", "model.lora.rank=4", "train.kl_coef=0.01"]
    with start_run(folder, *SETTINGS, *settings, "train.steps=6") as run:
        run.wait_for_step(3)
        os.kill(run.pid_of("policy-0"), signal.SIGKILL)
        ended = run.wait()

    assert ended.status == 0, ended.output
    path = folder / "all.json.gz"
    assert main(["trace", str(run.run_dir), "-o", str(path)]) == 0
    assert "sync again" in {event["name"] for event in read_timeline(path)}
    rows = [row for row in read_metrics(run.run_dir / "metrics.jsonl") if "train/loss" in row]
    assert all(row["train/behaviour_kl"] < 1e-7 for row in rows)
    assert rows[-1]["train/reference_kl"] > 1e-4


def test_a_run_that_runs_out_of_memory_resumes_without_kept_logits_and_then_beside_sleepers(
    folder: Path,
) -> None:
    _, events, output = trained(
        folder,
        "pool.sleep=none",
        "train.loss=odd_losses:lacks_memory_in_step_3",
        "train.checkpoint_every=1",
        steps=7,
        program="short_trainer",
        environ={"SHORT_AT": "99", "SHORT_KEEPS": "1"},
        torchrun=("--standalone", "--max-restarts=2"),
    )

    assert "training ran out of memory beside engines that stayed awake" in output
    because = "because this run ran out of memory;"
    lean, asleep = (
        f"{remedy}, {because}"
        for remedy in ("training computes logits twice", "engines sleep while the trainer computes")
    )
    assert (output.count(lean), output.count(asleep)) == (1, 1), output
    assert output.index(lean) < output.index(asleep)
    # Engines were awake in the third step of each process but the last, which no sleep began.
    assert freed(events) == [BOTH] * 7


def test_a_run_that_runs_out_of_memory_beside_sleepers_resumes_without_kept_logits(
    folder: Path,
) -> None:
    (folder / "short 1").touch()  # only once
    _, _, output = trained(
        folder,
        "pool.sleep=all",
        "train.loss=odd_losses:lacks_memory_in_step_3",
        "train.checkpoint_every=1",
        program="short_trainer",
        environ={"SHORT_AT": "99", "SHORT_KEEPS": "1"},
        torchrun=("--standalone", "--max-restarts=1"),
    )

    assert "Resume the run: from now on, training computes logits twice" in output
    lean = "training computes logits twice, because this run ran out of memory;"
    assert output.count(lean) == 1, output


def test_a_rank_without_room_makes_all_engines_sleep_from_then_on(
    folder: Path, rewards_asleep: list[float]
) -> None:
    rewards, events, output = trained(
        folder, "pool.sleep=none", program="short_trainer", environ={"SHORT_AT": "4"}
    )

    assert rewards == rewards_asleep
    for engine in ("policy-0", "policy-1"):
        assert freed(events, engine) == [BOTH] * (STEPS - 1)  # not in the third step
    sentence = "cuda:1 has room for 1.0 GiB. From here on, engines sleep while the trainer computes"
    assert output.count(sentence) == 1, output
    # Engines generate beside what it has cached since the step before.
    released = [output.count(f"rank {rank} releases its cache") for rank in (0, 1)]
    assert released[1] == released[0] + 1, output


def test_ranks_give_up_kept_logits_before_engines_sleep(
    folder: Path, rewards_asleep: list[float]
) -> None:
    rewards, events, output = trained(
        folder,
        "pool.sleep=none",
        program="short_trainer",
        environ={"SHORT_AT": "3", "SHORT_KEEPS": "1"},
    )

    assert rewards == rewards_asleep
    first, second = "training computes logits twice", "engines sleep while the trainer computes"
    assert output.count(first) == output.count(second) == 1, output
    # The second lack, in the fifth step, is that of engines awake again.
    assert output.index(first) < output.index(second), output
    assert freed(events) == [BOTH] * STEPS
    # What kept logits took is not measured as if the third step needed it.
    released = [each.count("rank 0 releases") for each in output.split("rank 0 measures a step")]
    assert released[2] == released[1] + 1, output
