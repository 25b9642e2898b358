"""Distinguishes a signal that stops the whole job from one that reached a single actor.

`scancel`, the end of a container and `kill` on a process group send their signal to every process
of a job. Then the ranks decide when to end: they stop at a step boundary, with a checkpoint, for
which they need the actors. The same signal to one actor alone is that actor's failure.

    actor gets SIGTERM ──▶ it keeps serving, and reports the signal to its supervisor
        ├─ a rank, supervisor or guardian gets one within STOP_WINDOW_S ──▶ a stop of the job
        └─ none of them does ──▶ the actor is ended, and replaced under its restart policy
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from umbra.runtime.waiting import first_of

STOP_WINDOW_S: Final = 1.0
"""Longest time between the first and the last process receiving the same stop. A longer window
delays the restart of an actor that was signalled alone; a shorter one mistakes a slow stop for
many failures."""


class JobStop:
    """Whether the job is being stopped. Owned by the supervisor."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._absent = asyncio.Event()
        self._absent.set()

    def request(self) -> None:
        """A stop signal reached a rank, the supervisor or the guardian."""
        self._requested.set()
        self._absent.clear()

    def withdraw(self) -> None:
        """torchrun has started the ranks again: the job continues."""
        self._requested.clear()
        self._absent.set()

    async def settle(self, own_stop: asyncio.Event) -> None:
        """After a signal to an actor: returns once it is known whether the job is being stopped.
        `own_stop` is set when umbra asks the actor to end, as it does at the end of each stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WINDOW_S):
                await first_of(self._requested, own_stop)

    async def outlast(self, own_stop: asyncio.Event) -> None:
        """Returns when the job is not being stopped, or `own_stop` is set."""
        await first_of(self._absent, own_stop)
