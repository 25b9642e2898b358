"""The promises of `make quickstart` and `make drill`, by the commands that they run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from umbra.trainer.drill.drilled_run import run_drilled

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "launch/configs/quickstart.toml"
LIMIT_S = 120.0

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.patient]


def run_python(*arguments: str, folder: Path, timeout_s: float) -> str:
    """Output of a Python command that has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
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


def read_summary(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder away from the repository, with the quickstart's files made in it."""
    folder = tmp_path_factory.mktemp("quickstart")
    run_python(
        "umbra.trainer.quickstart", "runs/quickstart-assets", folder=folder, timeout_s=LIMIT_S
    )
    return folder


def test_the_quickstart_learns_in_time_and_says_so(folder: Path) -> None:
    started = time.monotonic()

    output = run_python(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "umbra.trainer", str(CONFIG)),
        folder=folder,
        timeout_s=2 * LIMIT_S,
    )

    summary = read_summary(folder / "runs/quickstart/summary.json")
    assert time.monotonic() - started <= LIMIT_S
    assert summary["accuracy_before"] <= 0.4
    assert summary["accuracy_after"] >= 0.8
    assert summary["engine_restarts"] == 0
    assert summary["wall_s"] <= LIMIT_S
    for name in ("report", "plot"):
        assert summary["files"][name] in output
        assert (folder / summary["files"][name]).stat().st_size > 0


def test_the_drill_reaches_the_same_bar(folder: Path) -> None:
    output = run_python("umbra.trainer.drill", str(CONFIG), folder=folder, timeout_s=5 * LIMIT_S)

    summary = read_summary(folder / "runs/drill/summary.json")
    assert summary["accuracy_before"] <= 0.4
    assert summary["accuracy_after"] >= 0.8
    assert summary["engine_restarts"] >= 2
    assert "nothing left behind" in output


def test_a_drill_whose_run_leaves_something_behind_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    settings = ["train.steps=4", "pool.count=1", "reward.function=leaving_reward:reward"]
    settings.append(f'reward.python_path=["{Path(__file__).parent}"]')

    run = run_drilled("leaving", CONFIG, settings, folder / "leaving", random.Random(1))

    assert [line.partition(" /tmp/")[0] for line in run.leftovers] == ["socket folder"]
    assert f"leaving: left behind: {run.leftovers[0]}" in run.problems(bar=0.0)
