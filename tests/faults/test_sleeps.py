"""What engines free while the trainer computes, in whole runs of two ranks and two engines."""

from __future__ import annotations

import os
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
    folder: Path, *settings: str, steps: int = STEPS, **options: Any
) -> tuple[list[float], list[Event], str]:
    """The rewards of the steps, the timeline, and the output."""
    with start_run(folder, *SETTINGS, f"train.steps={steps}", *settings, **options) as run:
        ended = run.wait()
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
