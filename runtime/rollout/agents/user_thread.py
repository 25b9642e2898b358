from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

from umbra.runtime.actor.function_queue import FunctionQueue
from umbra.runtime.rollout.user_function import describe, frame_in_user_code

logger = logging.getLogger(__name__)

T = TypeVar("T")

# User code that does not yield for this long at shutdown is abandoned.
_JOIN_TIMEOUT_S: Final = 1.0
# Extra time for user code when its process continues after SIGSTOP, with deadlines expired.
_RESUMED_GRACE_S: Final = 0.5
_SHARED: Final = "all user code of a process shares one event loop: "

CURRENT_CALL: Final[ContextVar[Call | None]] = ContextVar("umbra_call", default=None)

OnOffence = Callable[[str | None, str], None]
"""Called with the call's label and what it did, on the loop's thread, below the user's code."""


class UserThread:
    """Runs user code, which may block its threads, or never return: the worker never waits for it.

    Asynchronous code shares an event loop. Synchronous functions run one at a time, since user code
    is seldom thread-safe, on `main_thread` if it is free, because Python lets only the main thread
    set alarms, as verifiers do. The loop gets the main thread where no functions run. At exit,
    tasks are cancelled; a thread that hangs in user code is abandoned until the process ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.main_thread: FunctionQueue | None = None
        self._runs_functions = False
        self._own_threads: list[FunctionQueue] = []
        self._started: concurrent.futures.Future[TaskHost] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._broken: Broken | None = None
        self._is_loop_broken = False
        self._breaking: asyncio.Future[Broken]
        self._caller: asyncio.AbstractEventLoop
        self._loop: GuardedLoop
        self._loop_thread: FunctionQueue
        self._functions: FunctionQueue
        self._stop: asyncio.Event
        self._host: TaskHost

    def expect_functions(self) -> None:
        """Reserves the main thread for `run_sync`. Called before this is entered."""
        self._runs_functions = True

    async def __aenter__(self) -> Self:
        self._caller = asyncio.get_running_loop()
        self._breaking = self._caller.create_future()
        main = self.main_thread
        self._functions = main if main and self._runs_functions else self._own_thread("functions")
        self._loop_thread = main if main and not self._runs_functions else self._own_thread("loop")
        self._loop_thread.put(self._serve_loop)
        self._host = await asyncio.wrap_future(self._started)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with contextlib.suppress(RuntimeError):  # user code has ended the loop
            self._loop.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                await asyncio.wrap_future(self._ended)
        for thread in self._own_threads:
            thread.stop()

    def _own_thread(self, kind: str) -> FunctionQueue:
        thread = FunctionQueue()
        thread.serve_on_a_thread(f"{self._name}-{kind}")
        self._own_threads.append(thread)
        return thread

    async def run_async(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        label: str,
        on_begin: Callable[[], None] = lambda: None,
    ) -> T:
        """Awaits `function()` on the user loop; `on_begin` is called when it begins to run."""

        async def call() -> T:
            self._caller.call_soon_threadsafe(on_begin)
            return await self._loop.run_call(label, function)

        try:
            return await self._host.run(call)
        finally:
            task = asyncio.current_task()
            if self._is_loop_broken and not (task and task.cancelling()):
                # Another call may have caused this outcome: it runs again elsewhere.
                await asyncio.get_running_loop().create_future()

    async def run_sync(
        self, function: Callable[[], T], label: str, limit_s: float, on_hang: str
    ) -> T:
        """Calls `function()` where synchronous functions run. Cancelling stops the wait, not the
        call. After `limit_s` from its beginning, the function counts as hanging: this never
        returns, and `broken` returns with the reason `on_hang`."""
        timers: list[asyncio.TimerHandle] = []

        def watch(delay_s: float, then: Callable[[], None]) -> None:
            timers[:] = [self._caller.call_later(delay_s, then)]

        def hang() -> None:
            what, _, remedy = on_hang.partition("; ")
            self._break(label, f"{what}: it is at {self._whereabouts(self._functions)}; {remedy}")

        def run() -> T:
            self._caller.call_soon_threadsafe(watch, limit_s, lambda: watch(_RESUMED_GRACE_S, hang))
            try:
                with _own_cancellations_raise():
                    return self._without_leftovers(function)
            finally:
                self._caller.call_soon_threadsafe(lambda: timers.pop().cancel())

        return await asyncio.wrap_future(self._functions.put(run))

    def _without_leftovers(self, function: Callable[[], T]) -> T:
        """Calls `function()`, and cancels an alarm that it leaves, which would hit another call."""
        try:
            return function()
        finally:
            if self._functions is self.main_thread:
                signal.setitimer(signal.ITIMER_REAL, 0)

    async def broken(self, block_limit_s: float, block_setting: str) -> Broken:
        """Returns the cause once no more user code can run: a function hangs, or the loop has been
        blocked for `block_limit_s` seconds or would have been stopped."""
        while not self._breaking.done():
            reacted: concurrent.futures.Future[None] = concurrent.futures.Future()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and is broken
                self._loop.call_soon_threadsafe(reacted.set_result, None)
            done = asyncio.wrap_future(reacted)
            for wait_s in (block_limit_s, _RESUMED_GRACE_S):
                await asyncio.wait(
                    [done, self._breaking],
                    timeout=wait_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if not done.done() and self._broken is None:
                self._on_blocked(block_limit_s, block_setting)
            await asyncio.wait([self._breaking], timeout=block_limit_s / 4)
        return self._breaking.result()

    def _on_blocked(self, limit_s: float, setting: str) -> None:
        call = self._loop.call_of(asyncio.current_task(self._loop))
        label = None if call is None else call.label
        self._break(
            label,
            f"{_whose(label)} did not yield for {limit_s:.3g} s, at "
            f"{self._whereabouts(self._loop_thread)}; {_SHARED}await asynchronous calls, put "
            f"blocking ones into asyncio.to_thread, or raise {setting}",
        )

    def _on_offence(self, label: str | None, what: str) -> None:
        place = _place(traceback.extract_stack())
        self._is_loop_broken = True
        self._break(
            label,
            f"{_whose(label)} {what}, at {place}; {_SHARED}call no loop.stop(), and cancel no "
            "tasks but those that it created",
        )

    def _break(self, label: str | None, reason: str) -> None:
        """May be called on any thread. The first cause counts: others follow from it."""
        if self._broken is None:
            self._broken = Broken(label, reason)
            self._caller.call_soon_threadsafe(self._breaking.set_result, self._broken)

    def _whereabouts(self, thread: FunctionQueue) -> str:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        stack = traceback.extract_stack(frames.get(thread.thread_id))
        logger.warning("user code does not return:\n%s", "".join(traceback.format_list(stack)))
        return _place(stack)

    def _serve_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: GuardedLoop(self._on_offence)) as runner:
                try:
                    runner.run(self._main())
                except BaseException as error:  # noqa: BLE001 -- SystemExit of a user's task
                    self._is_loop_broken = True
                    call = self._loop.failed_call(error)
                    label = None if call is None else call.label
                    self._break(
                        label,
                        f"{_whose(label)} ended the event loop with {describe(error)}; {_SHARED}"
                        "raise an exception in place of SystemExit",
                    )
        finally:
            self._ended.set_result(None)

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, GuardedLoop)
        self._loop = loop
        self._stop = asyncio.Event()
        async with TaskHost() as host:
            self._started.set_result(host)
            await self._stop.wait()


class Broken(NamedTuple):
    """Why no more user code can run here, and the label of the call that is to blame, if any."""

    label: str | None
    reason: str


@contextlib.contextmanager
def _own_cancellations_raise(task: asyncio.Task[Any] | None = None) -> Generator[None]:
    """Makes a CancelledError of user code, such as that of an inner task or an executor, an error
    like others, unless `task` is cancelled: callers would take it for a cancellation of theirs."""
    try:
        yield
    except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
        if task is not None and task.cancelling():
            raise
        text = "it awaited what its own code, or a library, had cancelled"
        raise RuntimeError(text).with_traceback(error.__traceback__) from error


def _whose(label: str | None) -> str:
    return f"user code for sample {label or 'unknown'}"


def _place(stack: traceback.StackSummary) -> str:
    frame = frame_in_user_code(stack) or stack[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{line}"


class Call:
    """A call of user code, with its tasks, callbacks and threads; its label is None at its end.

    `loop.stop()`, or `cancel()` of another sample's call  ──▶  nothing but `on_offence`

    Tasks that a call makes are not protected, because libraries share some between calls, such as
    those of a pool of connections.
    """

    def __init__(self, label: str) -> None:
        self.label: str | None = label


class GuardedLoop(asyncio.SelectorEventLoop):
    """The event loop that the user code of many samples shares: no sample may end it for others."""

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
            with _own_cancellations_raise(task):
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
