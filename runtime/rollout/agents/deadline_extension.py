from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class ExtendableDeadline:
    """`asyncio.timeout(limit_s)` from `start()` on, with pauses. Entered once, on its own loop."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._remaining_s = limit_s
        self._num_pauses = 0
        self._runs = False

    @property
    def expired(self) -> bool:
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._runs = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runs = False
        await self._timeout.__aexit__(kind, error, trace)

    def start(self) -> None:
        """Lets the time run. Called once, in the block; after the block it does nothing."""
        if self._can_move:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self.limit_s)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Excludes the block's time, after `start()`. The last of several pauses ends them all."""
        loop = asyncio.get_running_loop()
        if not self._num_pauses and self._can_move:
            self._remaining_s = (self._timeout.when() or loop.time()) - loop.time()
            self._timeout.reschedule(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses and self._can_move:
                self._timeout.reschedule(loop.time() + self._remaining_s)

    @property
    def _can_move(self) -> bool:
        return self._runs and not self._timeout.expired()
