"""The promises of `make quickstart`, by the commands that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_quickstart_learns_in_time_and_says_so(folder: Path) -> None:
    started = time.monotonic()

    output = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "umbra.trainer", str(CONFIG)),
        folder=folder,
        timeout_s=2 * LIMIT_S,
    )

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

    accuracies: list[float] = []
    for model in (f"{assets}/model", "runs/sft/export"):
        settings = (f"model.path={model}", "run.dir=runs/evaluated", "pool.count=1")
        command = ("-c", "from umbra.runtime.cli.umbra_command import main; main()", "eval")
        run_python(*command, str(CONFIG), *settings, folder=folder, timeout_s=LIMIT_S)
        results = json.loads((folder / "runs/evaluated/eval/results.json").read_text())
        accuracies.append(results["sets"]["eval"]["accuracy"])
    assert accuracies[0] <= 0.4
    assert accuracies[1] >= 0.8
