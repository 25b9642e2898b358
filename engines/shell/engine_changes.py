from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

from umbra.runtime.tracing.spans import span

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Changes:
    """Runs calls that change an engine one after the other, each to its end.

        caller A ── make ──▶ [A | B]   begins once earlier changes are done
        caller B ── make ──▶           B's caller is cancelled: B still runs after A

    A cancelled caller does not cancel its change: the engine's processes would do their part in any
    case, and this side would no longer know their state. Even a change that has not begun runs,
    because `EngineGate` counts a pause as made when it is requested. Leaving cancels all changes.
    """

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def make(
        self, change: Callable[[], Coroutine[Any, Any, _T]], traced: span | None = None
    ) -> _T:
        """Returns or raises the change's outcome. Must not be called within a change. `traced`
        measures the change without its wait for earlier ones."""
        outcome: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        task = self._group.create_task(self._settle(change, outcome, traced or nullcontext()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: outcome.cancel())  # if the task itself was cancelled
        return await outcome

    async def _settle(
        self,
        change: Callable[[], Coroutine[Any, Any, _T]],
        outcome: asyncio.Future[_T],
        traced: AbstractContextManager[object],
    ) -> None:
        try:
            async with self._order:
                with traced:
                    value = await change()
        except Exception as error:  # raised to the caller
            if outcome.cancelled():
                logger.warning("an engine change failed after its caller left", exc_info=error)
            else:
                outcome.set_exception(error)
        else:
            if not outcome.cancelled():
                outcome.set_result(value)
