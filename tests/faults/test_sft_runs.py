"""Supervised fine-tuning under torchrun: stopped, resumed, and RL training from its export."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from whole_runs import END_LIMIT_S, Ended, start_run

from umbra.trainer.checkpoint.run_dir import newest_version
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process]

SFT = "umbra.trainer.sft"
STEPS = 40

_CONFIG = """
[run]
dir = "run"
[model]
path = "{assets}/model"
[data]
train = "{assets}/train.jsonl"
eval = "{assets}/train.jsonl"
[sft]
completion_column = "answer"
batch_size = 6
[train]
steps = {steps}
learning_rate = 1e-3
max_tokens_per_micro_batch = 64
eval_every = 20
"""


def sft_folder(folder: Path, assets: Path) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(_CONFIG.format(assets=assets, steps=STEPS))
    return folder


def run_to_end(folder: Path, *settings: str, program: str = SFT) -> Ended:
    with start_run(folder, *settings, program=program) as run:
        ended = run.wait()
    assert ended.status == 0, ended.output
    return ended


def losses(folder: Path) -> dict[int, float]:
    rows = read_metrics(folder / "run/metrics.jsonl")
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def test_a_stopped_run_resumes_to_the_bit_and_rl_starts_from_what_it_learned(
    tmp_path: Path, folder: Path, assets: Path
) -> None:
    straight, stopped = (sft_folder(tmp_path / name, assets) for name in ("straight", "stopped"))
    output = run_to_end(straight).output
    with start_run(stopped, "train.steps=100000", program=SFT) as run:
        run.wait_for_step(2)
        os.kill(run.pid_of("torchrun"), signal.SIGTERM)
        ended = run.wait(END_LIMIT_S)
    (checkpoint,) = (stopped / "run/checkpoints").iterdir()
    num_done = max(losses(stopped))

    assert f"stopped by SIGTERM after {num_done} steps" in ended.output
    assert ended.output.count("Traceback") <= 1, ended.output  # torchrun's own
    assert checkpoint.name == f"step-{num_done:06d}"
    total = max(STEPS, num_done + 2)
    run_to_end(stopped, "run.resume=auto", f"train.steps={total}")
    if total > STEPS:  # the signal came late, on a busy machine
        run_to_end(straight, "run.overwrite=true", f"train.steps={total}")
    assert losses(stopped) == losses(straight)
    assert newest_version(stopped / "run/versions.jsonl") == 2  # a checkpoint of each start
    weights = [each / "run/export/model.safetensors" for each in (straight, stopped)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    held_out = {
        row["step"]: row["eval/loss"]
        for row in read_metrics(straight / "run/metrics.jsonl")
        if "eval/loss" in row
    }
    assert [*held_out][:3] == [0, 20, 40]
    assert held_out[0] > held_out[20] > held_out[40]
    assert f"after step {STEPS}: loss " in output or total > STEPS

    from_sft = f"model.path={straight / 'run/export'}"
    ended = run_to_end(
        folder,
        from_sft,
        "pool.engine=embedded",
        "pool.engine_args=",
        "train.max_logprob_difference=0",
        "train.steps=1",
        program="umbra.trainer",
    )
    assert "step 1/1" in ended.output


def test_a_resume_with_other_rows_is_refused(tmp_path: Path, assets: Path) -> None:
    folder = sft_folder(tmp_path / "run", assets)
    with start_run(folder, "train.steps=2", num_ranks=0, program=SFT) as run:
        assert run.wait().status == 0

    for changed in ("sft.batch_size=7", "train.seed=1", "data.overlong=truncate sft.max_len=11"):
        with start_run(
            folder, "run.resume=auto", *changed.split(), num_ranks=0, program=SFT
        ) as run:
            ended = run.wait()
        ended.check_failed("when the run began: it decides which rows a step has")


def test_settings_that_a_checkpoint_does_not_fit_are_not_recorded(
    tmp_path: Path, assets: Path
) -> None:
    folder = sft_folder(tmp_path / "run", assets)
    with start_run(folder, "train.steps=2", num_ranks=0, program=SFT) as run:
        assert run.wait().status == 0

    changed = ("run.resume=auto", "model.lora.rank=4", "train.steps=3")
    with start_run(folder, *changed, num_ranks=0, program=SFT) as run:
        run.wait().check_failed("LoRA")

    recorded = json.loads((folder / "run/settings.json").read_text())["settings"]
    assert (recorded["train"]["steps"], recorded["model"]["lora"]["rank"]) == (2, 0)
