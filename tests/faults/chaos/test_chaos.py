"""`make chaos` at reduced size: three seeds, and each way in which updates treat generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_account import VIOLATIONS

PROGRAM = Path(__file__).with_name("chaos.py")
LIMIT_S = 150.0

pytestmark = [pytest.mark.process, pytest.mark.slow]


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


@pytest.mark.parametrize(("seed", "group_size", "on_update"), [(2, 8, "keep"), (4, 4, "abort")])
def test_no_trajectory_is_lost_doubled_or_wrong(
    tmp_path: Path, seed: int, group_size: int, on_update: str
) -> None:
    done = run_chaos(
        tmp_path,
        *("--seed", str(seed), "--trajectories", "384", "--kills", "8", "--updates", "4"),
        *("--group-size", str(group_size), "--on-update", on_update),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"chaos: seed {seed}\n")
    summary = read_summary(tmp_path)
    assert summary["seed"] == seed
    assert summary["trajectories"] == 384
    assert summary["kills"] == summary["sigkills"] + summary["stops"] + summary["pauses"] == 8
    assert summary["updates"] == 4
    for violation in VIOLATIONS:
        assert summary[violation] == 0, violation
    assert summary["staleness_min"] >= 0
    assert summary["staleness_max"] <= 2
    assert summary["deaths"] >= summary["sigkills"]
    # Otherwise it would have been no chaos.
    assert summary["kills_by_role"] == {"engine": 5, "manager": 2, "worker": 1}
    assert summary["interruptions"] > 0
    assert sum(summary["injected"].values()) > 0
    assert summary["staleness_max"] > 0


def test_a_run_that_was_spared_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from chaos import ChaosRun  # torch comes with it
    from chaos_plan import ChaosPlan

    plan = ChaosPlan.of_size(seed=1, trajectories=80, kills=3, updates=5, group_size=4)
    run = ChaosRun(plan, tmp_path)

    assert run.report() == 1

    assert json.loads((tmp_path / "summary.json").read_text())["passed"] is False
    errors = capsys.readouterr().err
    for line in (
        "only 0 trajectories happened, 80 were planned",
        "only 0 kills happened, 3 were planned",
    ):
        assert line in errors
