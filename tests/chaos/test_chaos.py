"""`make chaos` at reduced size: three seeds, and each way in which updates treat generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("chaos.py")
LIMIT_S = 150.0

pytestmark = [pytest.mark.slow, pytest.mark.process]


def run_chaos(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), "--run-dir", str(folder / "chaos"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def read_summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "chaos/summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    ("seed", "group_size", "on_update"), [(1, 4, "abort"), (2, 8, "keep"), (3, 4, "drain")]
)
def test_no_trajectory_is_lost_doubled_or_wrong(
    tmp_path: Path, seed: int, group_size: int, on_update: str
) -> None:
    done = run_chaos(
        tmp_path,
        *("--seed", str(seed), "--trajectories", "640", "--kills", "10", "--updates", "5"),
        *("--group-size", str(group_size), "--on-update", on_update),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"chaos: seed {seed}\n")
    summary = read_summary(tmp_path)
    assert summary["seed"] == seed
    assert summary["trajectories"] == 640
    assert summary["kills"] == summary["sigkills"] + summary["stops"] + summary["pauses"] == 10
    assert summary["updates"] == 5
    for violation in ("lost", "duplicated", "wrong_version", "token_mismatches", "broken_groups"):
        assert summary[violation] == 0, violation
    assert summary["staleness_min"] >= 0
    assert summary["staleness_max"] <= 2
    assert summary["engine_deaths"] >= summary["sigkills"]
    # Otherwise it would have been no chaos.
    assert summary["interruptions"] > 0
    assert sum(summary["injected"].values()) > 0
    assert summary["staleness_max"] > 0


def test_sizes_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run_chaos(tmp_path, "--trajectories", "641", "--updates", "5")

    assert done.returncode == 2
    assert "give a multiple of updates x group_size = 20" in done.stderr
    assert not (tmp_path / "chaos").exists()
