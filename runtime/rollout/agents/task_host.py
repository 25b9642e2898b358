from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class TaskHost:
    """Runs coroutines on its event loop for callers on another. Must be entered on its own loop."""

    def __init__(self) -> None:
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(*exc_info)

    async def run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Awaits `function()` on the host's loop; errors and cancellation pass between loops."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._begin, function, result)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the coroutine was cancelled on its own loop") from None

    def _begin(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        result: concurrent.futures.Future[T],
    ) -> None:
        if result.cancelled():
            return
        task = self._tasks.create_task(_settle(function, result))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

        def cancel_if_abandoned(future: concurrent.futures.Future[T]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        result.add_done_callback(cancel_if_abandoned)


async def _settle(
    function: Callable[[], Coroutine[Any, Any, T]], result: concurrent.futures.Future[T]
) -> None:
    try:
        value = await function()
    except asyncio.CancelledError:
        result.cancel()
        raise
    except BaseException as error:  # noqa: BLE001  for the caller, even a SystemExit of user code
        if not result.cancelled():
            result.set_exception(error)
    else:
        if not result.cancelled():
            result.set_result(value)
