"""The promises of `make quickstart`, by the command that it runs."""

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

pytestmark = [pytest.mark.process, pytest.mark.slow]


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


def test_the_quickstart_learns_in_time_and_says_so(tmp_path: Path) -> None:
    make_assets = ("umbra.trainer.quickstart", "runs/quickstart-assets")
    run_python(*make_assets, folder=tmp_path, timeout_s=LIMIT_S)
    started = time.monotonic()

    output = run_python(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "umbra.trainer", str(CONFIG)),
        folder=tmp_path,
        timeout_s=2 * LIMIT_S,
    )

    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert time.monotonic() - started <= LIMIT_S
    assert summary["accuracy_before"] <= 0.4
    assert summary["accuracy_after"] >= 0.8
    assert summary["engine_restarts"] == 0
    assert summary["wall_s"] <= LIMIT_S
    for name in ("report", "plot"):
        assert summary["files"][name] in output
        assert (tmp_path / summary["files"][name]).stat().st_size > 0
