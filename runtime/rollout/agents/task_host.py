"""Runs coroutines on one event loop for callers on another: the bridge to user code's thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

from umbra.runtime.rollout.agents.user_function import frame_in_user_code

T = TypeVar("T")

logger = logging.getLogger(__name__)

# User code that does not yield for this long at shutdown is abandoned.
_JOIN_TIMEOUT_S: Final = 1.0
# A process that was stopped by SIGSTOP finds its deadlines expired when it continues. This is the
# extra time that the user loop then gets to react.
_RESUMED_GRACE_S: Final = 0.5


class Blocked(NamedTuple):
    """User code that blocks its event loop.

    Attributes:
        label: as passed to `run_async`, also for tasks that such a call created; None for other
            code, and for a call that has returned.
        location: file, line, function and source text.
    """

    label: str | None
    location: str


class _Call:
    """A call of `run_async`, including the tasks that it creates."""

    def __init__(self, label: str) -> None:
        self.label: str | None = label  # None once it has returned


class TaskHost:
    """Owns the tasks that other loops run on its loop. Must be entered on that loop."""

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
        """Awaits `function()` on the host's loop, from another loop.

        Its error is raised here; cancelling here cancels it there.
        """
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


class UserThread:
    """A daemon thread with an event loop for user code, which may block it. Use `async with`.

    Asynchronous user code shares the loop. A synchronous function runs on a thread of its own, one
    at a time, since user code is seldom thread-safe. At exit, running tasks are cancelled; a
    thread that hangs in user code is abandoned until the process ends.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._one_at_a_time = asyncio.Lock()
        self._calls: WeakKeyDictionary[asyncio.Task[Any], _Call] = WeakKeyDictionary()
        self._started: concurrent.futures.Future[TaskHost] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._host: TaskHost

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._host = await asyncio.wrap_future(self._started)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                await asyncio.wrap_future(self._ended)

    async def run_async(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        label: str,
        on_begin: Callable[[], None] = lambda: None,
    ) -> T:
        """Awaits `function()` on the user loop.

        Args:
            label: for `blocked`.
            on_begin: called here when `function` is about to run: the loop may be blocked before.
        """
        caller = asyncio.get_running_loop()

        async def call() -> T:
            caller.call_soon_threadsafe(on_begin)
            task = asyncio.current_task()
            assert task is not None
            self._calls[task] = me = _Call(label)
            try:
                return await function()
            finally:
                me.label = None  # tasks that it leaves behind are no longer part of the call

        return await self._host.run(call)

    async def blocked(self, limit_s: float) -> Blocked:
        """Returns once the user loop has been blocked for `limit_s` seconds, with the cause."""
        while True:
            reacted: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._loop.call_soon_threadsafe(reacted.set_result, None)
            done = asyncio.wrap_future(reacted)
            for wait_s in (limit_s, _RESUMED_GRACE_S):
                await asyncio.wait([done], timeout=wait_s)
            if not done.done():
                return self._what_blocks()
            await asyncio.sleep(limit_s / 4)

    def _what_blocks(self) -> Blocked:
        task = asyncio.current_task(self._loop)
        call = None if task is None else self._calls.get(task)
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        stack = traceback.extract_stack(frames.get(self._thread.ident or 0))
        logger.warning("user code blocks its loop:\n%s", "".join(traceback.format_list(stack)))
        frame = frame_in_user_code(stack) or stack[-1]
        line = f": {frame.line}" if frame.line else ""
        location = f"{frame.filename}:{frame.lineno} in {frame.name}{line}"
        return Blocked(None if call is None else call.label, location)

    async def run_sync(self, function: Callable[[], T], on_begin: Callable[[], None]) -> T:
        """Calls `function()` on a thread of its own. Cancelling stops the wait, not the call.

        Args:
            on_begin: called when it is this call's turn.
        """
        async with self._one_at_a_time:
            on_begin()
            result: concurrent.futures.Future[T] = concurrent.futures.Future()

            def work() -> None:
                try:
                    value = function()
                except StopIteration as error:  # a future cannot carry it
                    if result.set_running_or_notify_cancel():
                        result.set_exception(RuntimeError(f"raised StopIteration: {error}"))
                except BaseException as error:  # noqa: BLE001  for the caller, even a SystemExit
                    if result.set_running_or_notify_cancel():
                        result.set_exception(error)
                else:
                    if result.set_running_or_notify_cancel():
                        result.set_result(value)

            threading.Thread(target=work, name="user-function", daemon=True).start()
            return await asyncio.wrap_future(result)

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            self._ended.set_result(None)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._make_task)
        self._stop = asyncio.Event()
        async with TaskHost() as host:
            self._started.set_result(host)
            await self._stop.wait()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **settings: Any,
    ) -> asyncio.Task[T]:
        """Makes tasks that user code creates, as in `gather`, part of the creating call."""
        task = asyncio.Task(coroutine, loop=loop, **settings)
        maker = asyncio.current_task(loop)
        if maker is not None and maker in self._calls:
            self._calls[task] = self._calls[maker]
        return task
