"""The event loop that the user code of many samples shares: no sample may end it for the others.

`loop.stop()`, or `cancel()` of another sample's call  ──▶  nothing but `on_offence`

Tasks that a call makes are not protected, because libraries share some between calls, such as those
of a pool of connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Call:
    """A call of user code, with its tasks, callbacks and threads; its label is None at its end."""

    def __init__(self, label: str) -> None:
        self.label: str | None = label


CURRENT_CALL: Final[ContextVar[Call | None]] = ContextVar("umbra_call", default=None)

OnOffence = Callable[[str | None, str], None]
"""Called with the call's label and what it did, on the loop's thread, below the user's code."""


class GuardedLoop(asyncio.SelectorEventLoop):
    def __init__(self, on_offence: OnOffence) -> None:
        super().__init__()
        self._on_offence = on_offence
        self._calls: WeakKeyDictionary[asyncio.Task[Any], Call] = WeakKeyDictionary()
        self.set_task_factory(self._make_task)

    def call_of(self, task: asyncio.Task[Any] | None) -> Call | None:
        return None if task is None else self._calls.get(task)

    def failed_call(self, error: BaseException) -> Call | None:
        for task, call in list(self._calls.items()):
            if task.done() and not task.cancelled() and task.exception() is error:
                return call
        return None

    async def run_call(self, label: str, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Makes the present task a call, and awaits `function()`."""
        task = asyncio.current_task(self)
        assert isinstance(task, _OwnedTask)
        task.call = self._calls[task] = call = Call(label)
        CURRENT_CALL.set(call)
        try:
            return await function()
        finally:
            call.label = None  # tasks left behind are no longer part of it

    def stop(self) -> None:
        call = CURRENT_CALL.get()
        if call is None:
            super().stop()
        else:
            self._on_offence(call.label, "stopped the event loop that all user code shares")

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **settings: Any,
    ) -> asyncio.Task[T]:
        call = CURRENT_CALL.get()
        if call is None:
            return _OwnedTask(coroutine, loop=loop, on_offence=self._on_offence, **settings)
        task = asyncio.Task(coroutine, loop=loop, **settings)
        self._calls[task] = call
        return task


class _OwnedTask(asyncio.Task[Any]):
    """A task that only umbra and, if it is one, the call itself may cancel."""

    def __init__(self, *arguments: Any, on_offence: OnOffence, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.call: Call | None = None
        self._on_offence = on_offence

    def cancel(self, msg: Any | None = None) -> bool:
        canceller = CURRENT_CALL.get()
        if canceller is None or canceller is self.call:
            return super().cancel(msg)
        self._on_offence(canceller.label, "cancelled tasks that are not its own")
        return False
