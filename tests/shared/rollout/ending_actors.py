"""An engine and a manager whose processes end without being asked to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.engine_api.lifecycle import SleepLevel
from umbra.runtime.rollout.manager.rollout_manager import RolloutManager

ENDS: Final = {
    "SIGTERM": "stopped by SIGTERM (exit status 143)",
    "SIGINT": "stopped by SIGINT (exit status 130)",
    "os._exit(0)": "exited with status 0",
    "sys.exit()": "exited with status 0",
    "cancelled main task": "exited with status 1",
}
"""The ways in which a process can end, and their reports."""

IN_HERE: Final = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def end_process(how: str) -> None:
    """Ends the process; after a signal, it runs until its supervisor has noticed the signal."""
    if how == "os._exit(0)":
        os._exit(0)
    if how == "sys.exit()":
        sys.exit()
    if how == "cancelled main task":
        next(task for task in asyncio.all_tasks() if task.get_name() == "Task-1").cancel()
    else:
        os.kill(os.getpid(), signal.Signals[how])


class EndingEcho(EchoEngine):
    """The first of a pool ends at one point of each of its first lives.

    Args:
        lives: where and how each of them ends, in order. Where is "generation" (with tokens on
            their way), "sync" or "sleep"; how is a key of `ENDS`.
    """

    def __init__(self, *, lives: Sequence[tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        context = actor_context()
        ends = dict(enumerate(lives, 1)) if context.name == "policy-0" else {}
        self._point, self._how = ends.get(context.incarnation, ("", ""))

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        await super().submit(requests)
        if self._point == "generation":
            asyncio.get_running_loop().call_later(0.2, end_process, self._how)

    async def load(self) -> dict[str, int]:
        if self._point == "sync":
            end_process(self._how)
        return await super().load()

    async def sleep(self, level: SleepLevel) -> None:
        if self._point == "sleep":
            end_process(self._how)
        await super().sleep(level)


class EndingManager(RolloutManager):
    """Ends when the test calls it."""

    async def end(self, how: str) -> None:
        end_process(how)
