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
