"""Waits for the first of several events, and for a deadline that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def first_of(*events: asyncio.Event) -> None:
    """Returns once one of the events is set."""
    if any(event.is_set() for event in events):
        return
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


class Alarm:
    """Calls back once its condition has held for `delay_s` without a break."""

    def __init__(self, delay_s: float, on_expiry: Callable[[], None]) -> None:
        self.delay_s = delay_s
        self._on_expiry = on_expiry
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, holds: bool) -> None:
        if not holds and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif holds and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._on_expiry()
