"""What the programs of this folder share: their arguments, and the one line they answer with.

    python tests/bench/systems/NAME.py --spawned-at T --duration-s S

T is `time.monotonic()` at the moment the interpreter was started. With a duration the program
measures calls too, for about so long each; with 0 only its start. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from umbra.runtime.process.descendants import kill_all_descendants, living_descendants
from umbra.runtime.process.prctl import become_subreaper

_KILL_DEADLINE_S = 10.0
"""For what a system leaves behind when it is shut down: it takes milliseconds to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The measurement that this program was asked for."""

    spawned_at: float
    duration_s: float

    def since_spawn_s(self) -> float:
        """Seconds since this interpreter was started, imports included."""
        return round(time.monotonic() - self.spawned_at, 4)


Program = Callable[[Task], Awaitable[dict[str, Any]]]


def run_program(program: Program, *, loop_factory: Callable[[], Any] | None = None) -> None:
    """Runs `program`, prints its facts as one JSON line, and ends whatever it left behind.

    `loop_factory`: of the event loop, asyncio's own by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawned-at", type=float, required=True)
    parser.add_argument("--duration-s", type=float, required=True)
    arguments = parser.parse_args()
    task = Task(spawned_at=arguments.spawned_at, duration_s=arguments.duration_s)
    # Systems print to stdout as they like; only our line may reach the one we were given.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    become_subreaper()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            facts = runner.run(_as_coroutine(program(task)))
        facts["python"] = platform.python_version()
        os.write(answer_fd, json.dumps(facts).encode() + b"\n")
    finally:
        sys.stdout.flush()
        kill_all_descendants(_KILL_DEADLINE_S)


async def _as_coroutine(awaitable: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await awaitable


def descendants_resident_mb(without: set[int]) -> float:
    """Resident megabytes (10^6 bytes) of all processes below this one but `without`."""
    page_nbytes = os.sysconf("SC_PAGE_SIZE")
    total_nbytes = 0
    for identity in living_descendants(os.getpid()):
        if identity.pid in without:
            continue
        try:
            with open(f"/proc/{identity.pid}/statm") as statm:
                total_nbytes += int(statm.read().split()[1]) * page_nbytes
        except (OSError, IndexError):
            continue
    return round(total_nbytes / 1e6, 1)
