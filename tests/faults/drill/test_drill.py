"""The promises of `make drill`: training reaches its accuracy although engines are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("drill.py")
CONFIG = Path(__file__).parents[3] / "launch/configs/quickstart.toml"
LIMIT_S = 120.0

pytestmark = pytest.mark.process


def run_python(*arguments: str, folder: Path, timeout_s: float) -> str:
    """Output of a Python command that must succeed."""
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
    """An empty folder outside the repository with the quickstart's files."""
    folder = tmp_path_factory.mktemp("drill")
    make_assets = ("-m", "umbra.trainer.quickstart", "runs/quickstart-assets")
    run_python(*make_assets, folder=folder, timeout_s=LIMIT_S)
    return folder


@pytest.mark.slow
def test_the_drill_reaches_the_same_bar(folder: Path) -> None:
    output = run_python(str(PROGRAM), str(CONFIG), folder=folder, timeout_s=5 * LIMIT_S)

    summary = json.loads((folder / "runs/drill/summary.json").read_text())
    assert summary["accuracy_before"] <= 0.4
    assert summary["accuracy_after"] >= 0.8
    assert summary["engine_restarts"] >= 2
    assert "nothing left behind" in output


def test_the_drill_does_not_end_with_its_reader(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(PROGRAM), str(tmp_path / "missing.toml")]

    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)

    os.close(writing)
    assert done.stderr.startswith(b"drill: failed: config file"), done.stderr
    assert done.returncode == 1
