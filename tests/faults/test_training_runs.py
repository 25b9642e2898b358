"""Whole training runs under torchrun: ranks, supervisor, engines, manager, workers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_names import check_metrics, check_run_directory
from http_server import run_umbra
from pool_log import assert_never_both_awake
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.filesystem import FileSystemReader
from training_models import save_model
from transformers import AutoModelForCausalLM
from whole_runs import start_run

from umbra.runtime.engine_api.lora import EMBEDDING, LINEAR, read_adapter_rank
from umbra.runtime.reports.run_metrics import PANELS
from umbra.trainer.config.config_file import load_config
from umbra.trainer.reporting.metrics_loggers import read_metrics
from umbra.trainer.reporting.metrics_plot import draw, panels

pytestmark = [pytest.mark.process, pytest.mark.slow]

RUN_LIMIT_S = 150.0
CONFIG = """
[run]
dir = "{folder}/run"
[model]
path = "{folder}/model"
[data]
train = "{folder}/train.jsonl"
eval = "{folder}/eval.jsonl"
[reward]
function = "plain_rewards:low_digits"
accuracy_threshold = 0.5
python_path = ["{tests}"]
[rollout]
groups_per_step = 8
group_size = 4
max_new_tokens = 8
[pool]
count = {engines}
max_num_seqs = 64
tick_ms = 5.0
[train]
steps = 4
learning_rate = 0.01
eval_every = 2
checkpoint_every = 2
"""


@pytest.fixture
def folder(tmp_path: Path, fork_server: None) -> Path:
    save_model(tmp_path / "model", initializer_range=0.02)
    for name, count in (("train", 64), ("eval", 16)):
        rows = [{"prompt": f"{name} {idx}=", "answer": "low"} for idx in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def write_config(folder: Path, engines: int = 1) -> Path:
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder, tests=Path(__file__).parent, engines=engines))
    return path


def run(
    config: Path, num_ranks: int, *overrides: str, environ: Mapping[str, str] | None = None
) -> str:
    """Runs to the end; returns the output. The documents explain all that the run leaves."""
    with start_run(config.parent, *overrides, num_ranks=num_ranks, environ=environ) as started:
        ended = started.wait(RUN_LIMIT_S)
    assert ended.status == 0, ended.output
    run_dir = Path(load_config(config, overrides).run.dir)
    check_metrics(read_metrics(run_dir / "metrics.jsonl"))
    check_run_directory(run_dir)
    return ended.output


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def check_idle_shares(steps: Sequence[Mapping[str, float]]) -> None:
    """From batch to batch, engines are idle at least while the trainer computes."""
    for row in steps:
        assert 0 <= row["rollout/engine_no_work_share"] <= row["rollout/engine_idle_share"] < 1
        assert 0 < row["time/rank_idle_share"] < 1
    for before, row in pairwise(steps):
        longest_s = before["time/step_s"] + row["time/step_s"]
        assert row["rollout/engine_idle_share"] > before["time/train_s"] / longest_s
    asleep = [r["rollout/engine_idle_share"] - r["rollout/engine_no_work_share"] for r in steps]
    assert sum(asleep) > 0


def test_a_run_learns_and_resumes_with_another_number_of_ranks(folder: Path) -> None:
    config = write_config(folder, engines=2)

    output = run(config, 2)

    summary = read_summary(folder)
    assert "step 4/4  reward" in output
    assert "100%|" not in output, "a library drew a progress bar"
    assert summary["steps"] == 4
    assert summary["engine_restarts"] == 0
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert summary["reward_last"] > summary["reward_first"]
    for name in ("report.html", "metrics.png", "export/model.safetensors", "metrics.jsonl"):
        assert (folder / "run" / name).exists(), name
    steps = [row for row in read_metrics(folder / "run/metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    # Behaviour logprobs of the engines are the policy's own: the first update is on-policy.
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-3 for row in steps)
    assert all(row["train/clipped_share"] == 0 for row in steps)
    check_idle_shares(steps)
    for phase in ("sync", "generation", "train"):
        names = [f"memory/{phase}_{what}_gib" for what in ("allocated", "peak")]
        assert all(0.05 < row[names[0]] <= row[names[1]] < 8 for row in steps)
    evaluations = read_metrics(folder / "run/metrics.jsonl")
    assert [r["step"] for r in evaluations if "eval/accuracy" in r] == [0, 2, 4]

    run(config, 1, "run.resume=auto", "train.steps=6", "pool.count=1")

    resumed = read_summary(folder)
    assert resumed["steps"] == 6
    assert resumed["accuracy_before"] == summary["accuracy_before"]
    rows = read_metrics(folder / "run/metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    versions = [row["sync/version"] for row in rows if "sync/version" in row]
    assert versions == sorted(set(versions))


def test_a_run_of_epochs_keeps_its_best_checkpoint_and_resumes_from_it(folder: Path) -> None:
    config = write_config(folder)
    settings = (
        *("train.steps=", "train.eval_at_start=false", "eval.max_new_tokens=4"),
        *("train.checkpoint_every=0", "train.keep_checkpoints=1", "train.keep_best_by=reward"),
    )

    output = run(config, 2, *settings, "train.epochs=0.5")

    rows = read_metrics(folder / "run/metrics.jsonl")
    scores = {row["step"]: row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row}
    assert "step 4/4  reward" in output
    assert "train.epochs = 0.5 are 4 steps" in output
    assert list(scores) == [2, 4]
    assert all(row["eval/completion_len_mean"] <= 4 for row in rows if "eval/accuracy" in row)
    best = max(scores, key=lambda step: (scores[step], -step))
    link = folder / "run/checkpoints/best"
    assert link.resolve().name == f"step-{best:06d}"
    kept = {path.name for path in link.parent.iterdir()}
    assert kept == {"best", "step-000004", f"step-{best:06d}"}

    output = run(config, 1, *settings, "train.epochs=0.75", f"run.resume={link}")

    assert f"resuming after step {best}" in output
    assert "changed since the last start: train.epochs = 0.75 (was 0.5), train.steps = 6" in output
    assert read_summary(folder)["steps"] == 6


def test_umbra_eval_scores_models_as_their_training_did(folder: Path) -> None:
    config = write_config(folder)
    run(config, 0, "train.steps=2", "train.ema=0.5")
    metrics = read_metrics(folder / "run/metrics.jsonl")
    first, last = (row["eval/reward_mean"] for row in metrics if "eval/reward_mean" in row)
    assert first != last

    def evaluate(*arguments: object) -> Any:
        with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as short:
            return run_umbra(Path(short), "eval", config, "pool.device=cpu", *arguments)

    def scores(*arguments: object) -> dict[str, Any]:
        done = evaluate(*arguments)
        assert done.returncode == 0, done.stderr
        assert "set" in done.stdout
        found: dict[str, Any] = json.loads((folder / "run/eval/results.json").read_text())
        return found

    before = scores(f"eval.sets.train={folder}/train.jsonl")
    most_probable = ("eval.temperature=1.0", "eval.top_k=1")  # greedy by another way
    after = scores(*most_probable, "--checkpoint", folder / "run/checkpoints/step-000002")
    sampled = scores(
        *("eval.samples=4", "eval.temperature=1.0", "reward.accuracy_threshold=0.25"),
        f"model.path={folder}/run/export",
    )

    averaged = scores("--checkpoint", folder / "run/checkpoints/step-000002", "--ema")
    refused = evaluate("--checkpoint", folder / "run", f"run.dir={folder}/other")
    without_checkpoint = evaluate("--ema")

    assert refused.returncode == 2
    near = f"name one of the folders in {folder}/run/checkpoints, such as step-000002"
    assert f"run is not a checkpoint: {near}" in refused.stderr
    assert without_checkpoint.returncode == 2
    assert "--ema evaluates a checkpoint's moving average: name a" in without_checkpoint.stderr
    assert averaged["model"].endswith("/step-000002, moving average")
    assert before["sets"]["eval"]["mean_reward"] == first
    assert before["num_prompts"] == 16 + before["sets"]["train"]["num_prompts"] == 80
    assert after["mean_reward"] == last
    assert list(sampled["pass_at"]) == ["1", "2", "4"]
    assert before["prompts"].keys() == before["sets"].keys()
    assert len(before["prompts"]["train"]) == 64
    low, high = sampled["accuracy_interval"]
    assert 0 <= low < sampled["accuracy"] < high <= 1
    assert 0 < sampled["accuracy"] == sampled["pass_at"]["1"] < sampled["pass_at"]["4"]


def test_an_offloading_run_is_the_same_run_and_resumes_from_its_checkpoint(folder: Path) -> None:
    config = write_config(folder)
    decoupled = ["train.loss=decoupled", "train.updates_per_batch=2", "train.eval_every=2"]
    decoupled += ["rollout.top_p=0.8", "rollout.top_k=40", 'rollout.stop=["a", "7"]']
    decoupled += ["train.mini_batches=2", "train.mask_truncated=true"]
    decoupled += ["reward.function=", "reward.functions.low=plain_rewards:low_digits"]
    decoupled += ["reward.functions.even=plain_rewards:even_digits", "reward.weights.even=0.5"]
    decoupled += ["train.advantage=gdpo", "train.advantage_norm=batch", "reward.overlong_buffer=4"]

    def metrics_of(name: str, offload: str, *, is_resumed: bool) -> list[dict[str, float]]:
        options = [f"run.dir={folder}/{name}", f"train.offload={offload}", "train.kl_coef=0.1"]
        options += decoupled
        if is_resumed:
            run(config, 0, *options, "train.steps=2")
            options += ["run.resume=auto"]
        run(config, 2 if is_resumed else 0, *options, "train.steps=3")
        return read_metrics(folder / name / "metrics.jsonl")

    def losses(metrics: Sequence[Mapping[str, float]], *, offloads: bool) -> list[float]:
        steps = [row for row in metrics if "train/loss" in row]
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert all(("time/offload_s" in row) == offloads for row in steps)
        # Engines and trainer are time-sliced, so no token is old, and both truncate alike.
        assert all(abs(row["train/importance_mean"] - 1) < 1e-3 for row in steps)
        assert all(abs(row["train/importance_max"] - 1) < 1e-3 for row in steps)
        assert all(row["train/importance_limited_share"] == 0 for row in steps)
        return [row["train/loss"] for row in steps]

    plain = metrics_of("plain", "none", is_resumed=False)
    offloading = metrics_of("offloading", "all", is_resumed=True)

    expected = pytest.approx(losses(plain, offloads=False), abs=1e-6)
    assert losses(offloading, offloads=True) == expected
    check_picture(plain)


def test_a_run_of_adapters_resumes_from_them_and_exports_them_also_merged(folder: Path) -> None:
    config = write_config(folder)
    save_model(folder / "model", "llama", initializer_range=0.02)  # with a head of its own
    targets = 'model.lora.targets=["embed_tokens", "lm_head", "q_proj", "down_proj"]'
    options = ["train.kl_coef=0.1", "train.offload=all", "train.eval_every=0"]
    options += ["model.lora.rank=4", targets]

    def losses(name: str, num_ranks: int, *more: str) -> list[tuple[float, float]]:
        run(config, num_ranks, *options, f"run.dir={folder}/{name}", *more)
        rows = read_metrics(folder / name / "metrics.jsonl")
        rows = [row for row in rows if "train/loss" in row]
        assert all(row["train/behaviour_kl"] < 1e-7 for row in rows)
        return [(row["train/loss"], row["train/reference_kl"]) for row in rows]

    whole = losses("run", 0, "train.steps=3")
    losses("resumed", 2, "train.steps=2")
    resumed = losses(
        "resumed", 2, "train.steps=3", "run.resume=auto", "model.lora.merge=false"
    )  # its engines compute with adapters

    assert len(whole) == 3
    for expected, found in zip(whole, resumed, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert 0.0 == whole[0][1] < whole[2][1]
    check_exports(folder)


def check_exports(folder: Path) -> None:
    """Base and adapter, merged weights, and the export of the checkpoint compute the same."""
    checkpoint = folder / "run/checkpoints/step-000003"
    assert run_umbra(folder, "export", checkpoint, folder / "again").returncode == 0
    auto: Any = AutoModelForCausalLM
    tokens = torch.arange(2, 30)[None]
    start, merged = auto.from_pretrained(folder / "model"), auto.from_pretrained(folder / "again")
    adapter = load_file(folder / "run/export/adapter/adapter_model.safetensors")
    again = load_file(folder / "again/adapter/adapter_model.safetensors")
    settings = json.loads((folder / "run/export/adapter/adapter_config.json").read_text())
    with torch.no_grad():
        before = start(tokens).logits
        for name, first in adapter.items():
            for ends in (LINEAR, EMBEDDING):
                if name.endswith(ends[0]):
                    module = name.removesuffix(ends[0])
                    change = (
                        settings["lora_alpha"] / settings["r"] * adapter[module + ends[1]] @ first
                    )
                    weight = start.get_submodule(module.removeprefix("base_model.model.")).weight
                    weight += change if ends is LINEAR else change.t()
        expected = start(tokens).logits
        assert torch.allclose(merged(tokens).logits, expected, atol=1e-5)
        exported = auto.from_pretrained(folder / "run/export")
        assert torch.equal(exported(tokens).logits, merged(tokens).logits)
    assert len(adapter) == 12
    assert adapter.keys() == again.keys()
    assert all(torch.equal(matrix, again[name]) for name, matrix in adapter.items())
    assert (expected - before).abs().max() > 0.01
    saved = FileSystemReader(checkpoint).read_metadata()
    trained = [name for name in saved.state_dict_metadata if name.startswith("model.")]
    assert len(trained) == 12
    assert all(".lora_" in name for name in trained)
    read_adapter_rank("trained", folder / "again/adapter", folder / "model")


def check_picture(metrics: Sequence[dict[str, float]]) -> None:
    """Asserts that the panels of a run are drawn, that of the KL among them."""
    steps = [row for row in metrics if "time/step_s" in row]
    found = panels(metrics)
    axes = draw(found, "run").axes
    assert [panel.title for panel in found] == [axis.get_ylabel() for axis in axes]
    labels = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in axes]
    assert labels == [
        [
            *(label for name, label in panel.series.items() if not name.startswith("run/")),
            *["rest"] * panel.is_step_time,
        ]
        for panel in PANELS
        if panel.title != "Staleness in steps"
        and not panel.only_with.startswith(("run/", "sft/", "train/teacher", "critic/"))
    ]
    reward, accuracy = axes[0].lines
    assert list(reward.get_xdata()) == [1, 2, 3]
    assert list(reward.get_ydata()) == [row["rollout/reward_mean"] for row in steps]
    assert accuracy.get_xdata()[0] == 0
    (areas,) = [axis.collections for axis in axes if axis.collections]
    for row in steps:
        for area, top in ((areas[0], row["time/rollout_s"]), (areas[-1], row["time/step_s"])):
            (outline,) = area.get_paths()
            inside = [outline.contains_point((row["step"], top * part)) for part in (0.999, 1.001)]
            assert inside == [True, False]


def test_sigterm_while_memory_is_offloaded_ends_the_run_with_a_checkpoint(folder: Path) -> None:
    write_config(folder)
    endless = ("train.steps=100000", "train.eval_every=0", "train.offload=all")
    with start_run(folder, *endless) as started:
        started.wait_for_step(1)
        os.kill(started.pid_of("torchrun"), signal.SIGTERM)
        ended = started.wait()

    summary = read_summary(folder)
    assert summary["stopped_by"] == "SIGTERM", ended.output
    checkpoint = folder / "run/checkpoints" / f"step-{summary['steps']:06d}"
    assert (checkpoint / "COMPLETE").exists()


JUDGE = """
[pools.judge]
model_path = "{folder}/judge"
tick_ms = 5.0
max_num_seqs = 16
"""


def test_a_hybrid_run_shares_its_memory_with_a_judge(folder: Path) -> None:
    save_model(folder / "judge", seed=7)
    config = write_config(folder)
    config.write_text(config.read_text() + JUDGE.format(folder=folder))

    run(config, 2, "reward.function=plain_rewards:judged", environ={"UMBRA_LOG_LEVEL": "DEBUG"})

    summary = read_summary(folder)
    steps = [row for row in read_metrics(folder / "run/metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert summary["reward_last"] > summary["reward_first"]
    assert summary["engine_restarts"] == 0
    log = folder / "run/logs/supervisor.log"
    # a batch and an evaluation can wait for more than one turn, but not each prompt for its own
    assert 5 <= log.read_text().count("pool judge has the memory after policy") <= 16
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-3 for row in steps)
    assert_never_both_awake(log)
