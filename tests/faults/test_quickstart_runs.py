"""The promises of `make quickstart`, by the commands that it runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest
from whole_runs import start_run

from umbra.trainer.reporting.metrics_loggers import read_metrics

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "launch/configs/quickstart.toml"
LIMIT_S = 120.0

pytestmark = pytest.mark.process


def run_python(*arguments: str, folder: Path, timeout_s: float) -> str:
    """Output of a Python command that has to succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository with the quickstart's files."""
    folder = tmp_path_factory.mktemp("quickstart")
    make_assets = ("-m", "umbra.trainer.quickstart", "runs/quickstart-assets")
    run_python(*make_assets, folder=folder, timeout_s=LIMIT_S)
    return folder


def run_quickstart(folder: Path) -> str:
    return run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "umbra.trainer", str(CONFIG)),
        folder=folder,
        timeout_s=2 * LIMIT_S,
    )


@pytest.mark.slow
def test_the_quickstart_learns_in_time_and_says_so(folder: Path) -> None:
    started = time.monotonic()

    output = run_quickstart(folder)

    summary = json.loads((folder / "runs/quickstart/summary.json").read_text())
    assert time.monotonic() - started <= LIMIT_S
    assert summary["accuracy_before"] <= 0.4
    assert summary["accuracy_after"] >= 0.8
    assert summary["engine_restarts"] == 0
    assert summary["wall_s"] <= LIMIT_S
    for name in ("report", "plot"):
        assert summary["files"][name] in output
        assert (folder / summary["files"][name]).stat().st_size > 0


@pytest.mark.slow
def test_fine_tuning_on_right_answers_raises_the_held_out_accuracy(folder: Path) -> None:
    assets = "runs/quickstart-assets"
    (folder / "sft.toml").write_text(
        f'run.dir = "runs/sft"\nmodel.path = "{assets}/model"\n'
        f'data.train = "{assets}/train.jsonl"\ndata.eval = "{assets}/eval.jsonl"\n'
        'sft = {completion_column = "answer", batch_size = 64}\n'
        "train = {steps = 30, learning_rate = 3e-3}\n"
    )

    run_python("-m", "umbra.trainer.sft", "sft.toml", folder=folder, timeout_s=LIMIT_S)

    assert accuracy_of(f"{assets}/model", folder) <= 0.4
    assert accuracy_of("runs/sft/export", folder) >= 0.8


WITHOUT_REWARDS = """
[run]
dir = "run"
[model]
path = "runs/quickstart-assets/model"
dtype = "float32"
[data]
train = "runs/quickstart-assets/train.jsonl"
[rollout]
groups_per_step = 64
group_size = 1
max_new_tokens = 10
[pool]
engine = "embedded"
max_context_len = 32
tick_ms = 20.0
[pools.teacher]
engine = "embedded"
model_path = "runs/quickstart/export"
tick_ms = 5.0
[train]
device = "cpu"
steps = 30
learning_rate = 5e-4
betas = [0.9, 0.95]
advantage = "none"
teacher_kl_coef = 1.0
"""


@pytest.mark.slow
def test_a_student_without_rewards_learns_from_the_trained_model_though_its_engine_is_killed(
    folder: Path,
) -> None:
    if not (folder / "runs/quickstart/export").exists():
        run_quickstart(folder)
    (folder / "config.toml").write_text(WITHOUT_REWARDS)

    with start_run(folder, num_ranks=1, is_forked=False) as run:
        run.wait_for_step(5)
        os.kill(run.pid_of("teacher-0"), signal.SIGKILL)
        ended = run.wait(LIMIT_S)

    assert ended.status == 0, ended.output
    steps = [row for row in read_metrics(folder / "run/metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert json.loads((folder / "run/summary.json").read_text())["engine_restarts"] == 1
    assert all(row["rollout/reward_max"] == 0 for row in steps)
    divergences = [float(row["train/teacher_kl"]) for row in steps]
    assert mean(divergences[-5:]) < mean(divergences[:3]) / 4
    assert accuracy_of("runs/quickstart-assets/model", folder) <= 0.4
    assert accuracy_of("run/export", folder) >= 0.8


COPYING = """
[run]
dir = "copying"
[model]
path = "runs/quickstart-assets/model"
dtype = "float32"
[data]
train = "copying.jsonl"
[sft]
batch_size = 64
[train]
device = "cpu"
steps = 150
learning_rate = 2e-3
betas = [0.9, 0.95]
schedule = "linear"
"""
SELF_TAUGHT = """
[run]
dir = "self-taught"
[model]
path = "copying/export"
dtype = "float32"
[data]
train = "runs/quickstart-assets/train.jsonl"
teacher_template = "known {successful_completion} {prompt}"
[reward]
function = "umbra.trainer.quickstart.quickstart_task:reward"
[rollout]
groups_per_step = 16
group_size = 4
max_new_tokens = 10
[pool]
engine = "embedded"
max_context_len = 64
tick_ms = 10.0
[train]
device = "cpu"
steps = 12
learning_rate = 5e-4
betas = [0.9, 0.95]
advantage = "none"
teacher_kl_coef = 1.0
"""


@pytest.mark.slow
def test_a_policy_teaches_itself_by_what_succeeded(folder: Path) -> None:
    """It can copy an answer that it is shown. Without one, it mostly does not know."""
    rng = random.Random(0)
    with (folder / "copying.jsonl").open("w") as file:
        for line in (folder / "runs/quickstart-assets/train.jsonl").read_text().splitlines():
            prompt, answer = (row := json.loads(line))["prompt"], row["answer"]
            if rng.random() < 0.6:
                prompt = f"known {answer} {prompt}"
            elif not prompt.startswith("all ") and rng.random() < 0.7:
                answer = "?"
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
    (folder / "copying.toml").write_text(COPYING)
    run_python("-m", "umbra.trainer.sft", "copying.toml", folder=folder, timeout_s=2 * LIMIT_S)
    (folder / "config.toml").write_text(SELF_TAUGHT)

    run_python("-m", "umbra.trainer", "config.toml", folder=folder, timeout_s=2 * LIMIT_S)

    steps = read_metrics(folder / "self-taught/metrics.jsonl")
    assert [row["step"] for row in steps if "train/teacher_kl" in row] == list(range(1, 13))
    assert accuracy_of("copying/export", folder) <= 0.4
    assert accuracy_of("self-taught/export", folder) >= 0.8


def accuracy_of(model: str, folder: Path) -> float:
    settings = (f"model.path={model}", "run.dir=runs/evaluated", "pool.count=1")
    command = ("-c", "from umbra.runtime.cli.umbra_command import main; main()", "eval")
    run_python(*command, str(CONFIG), *settings, folder=folder, timeout_s=LIMIT_S)
    results = json.loads((folder / "runs/evaluated/eval/results.json").read_text())
    return float(results["sets"]["eval"]["accuracy"])
