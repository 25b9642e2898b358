"""Processes that a dead child left to an actor do not stay as zombies; its own children do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_adopted_processes_are_reaped_and_own_children_keep_their_status() -> None:
    program = Path(__file__).parents[1] / "programs" / "adopting_parent.py"
    done = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )

    before, after, statuses = json.loads(done.stdout)
    assert (before, after) == (5, 0)
    assert statuses == {
        "subprocess": 3,
        "os.fork": 4,
        "fork": 5,
        "spawn": 5,
        "posix_spawn": 7,
        "asyncio": 6,
    }
