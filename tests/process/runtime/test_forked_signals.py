"""Processes that user code forks are ended by SIGTERM, and their signals are not their parent's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROGRAM: Final = Path(__file__).parents[1] / "programs" / "forking_parent.py"


@pytest.mark.parametrize("parent", ["loop", "rank"])
def test_sigterm_to_a_forked_child_ends_the_child_and_only_the_child(parent: str) -> None:
    command = [sys.executable, str(PROGRAM), parent]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    ends, seen_by_parent = json.loads(done.stdout)

    assert ends == {
        "fork": [-15] * 20,
        "spawn": -15,
        "pool": "[1, 2]",
        "executor": "[1, 2]",
        "os.fork": [-15] * 20,
        "program": -15,
        "program with preexec_fn": -15,
    }
    assert seen_by_parent == ["SIGTERM"]  # the one that it sent itself
