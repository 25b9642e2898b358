"""Blocking handles that a session gives to plain code: an actor, and a pool's engines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, Self, TypeVar

import uvloop

from umbra.runtime.errors import JobFailed, MailboxClosed
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.rpc.wire import ActorRef

T = TypeVar("T")


class SyncHandle:
    """Calls one actor from plain code; see `rpc_client.Handle` for the outcomes."""

    def __init__(self, loop: LoopThread, handle: Handle) -> None:
        self._loop = loop
        self._handle = handle

    @property
    def ref(self) -> ActorRef:
        return self._handle.ref

    def call(self, method: str, /, *args: object, timeout_s: float = 30.0, **kwargs: object) -> Any:
        """Calls `method` and waits for its outcome."""
        return self._loop.run(self._handle.call(method, *args, timeout_s=timeout_s, **kwargs))

    def stream(
        self, method: str, /, *args: object, timeout_s: float | None = 30.0, credits: int = 16
    ) -> Generator[Any, None, None]:
        """Iterates over a stream; closing the generator cancels the callee's."""
        opened = self._handle.stream(method, *args, timeout_s=timeout_s, credits=credits)
        items = self._loop.run(opened.__aenter__())

        async def take() -> Any:
            return await anext(items)

        async def leave() -> None:
            await opened.__aexit__(None, None, None)

        try:
            while True:
                try:
                    item = self._loop.run(take())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            # A generator may outlive its session.
            with contextlib.suppress(MailboxClosed):
                self._loop.run(leave(), even_if_failed=True)


class Pool:
    """The engines of one pool, from the trainer's side. One rank alone may call it."""

    def __init__(self, supervisor_call: Callable[..., Any], name: str) -> None:
        self._supervisor_call = supervisor_call
        self.name = name

    def states(self) -> list[dict[str, Any]]:
        """Per engine: `engine`, `incarnation`, `state`, `version`, `num_restarts`."""
        states: list[dict[str, Any]] = self._supervisor_call("pool_states", self.name)
        return states

    def pause(self, mode: str = "abort", timeout_s: float = 60.0) -> None:
        """Stops generation: `abort`, `keep` (freeze) or `drain` (finish first)."""
        self._call("pool_pause", mode, timeout_s=timeout_s)

    def resume(self, timeout_s: float = 60.0) -> None:
        self._call("pool_resume", timeout_s=timeout_s)

    def sleep(
        self,
        level: int = 2,
        timeout_s: float = 60.0,
        tags: Sequence[str] = ("weights", "kv_cache"),
    ) -> None:
        """Pauses the engines and frees the parts in `tags`: level 1 keeps weights on the host,
        level 2 drops them."""
        self._call("pool_sleep", level, list(tags), timeout_s=timeout_s)

    def wake(self, tags: list[str], timeout_s: float = 60.0) -> None:
        """Allocates memory again: `weights`, `kv_cache`."""
        self._call("pool_wake", tags, timeout_s=timeout_s)

    def _call(self, method: str, *args: object, timeout_s: float) -> None:
        self._supervisor_call(method, self.name, *args, timeout_s, timeout_s=timeout_s + 5.0)


class _Job(Generic[T]):
    """One coroutine on its way from the calling thread to the loop and back."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], essential: bool) -> None:
        self.coroutine = coroutine
        self.essential = essential
        self.result: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.task: asyncio.Task[None] | None = None


class LoopThread:
    """Runs an event loop on a background thread, for code that is not asynchronous (SPMD trainers).
    Owns the thread, its loop and all tasks on it. A failure posted with `fail()` ends every blocked
    `run()`, now and later, with `JobFailed`, so that no rank waits for a job that is lost."""

    def __init__(self, name: str) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._jobs: set[_Job[Any]] = set()
        self._failure: JobFailed | None = None
        self._loop: asyncio.AbstractEventLoop
        self._tasks: asyncio.TaskGroup
        self._stop: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Cancels running tasks and joins the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def failure(self) -> JobFailed | None:
        return self._failure

    def run(self, coroutine: Coroutine[Any, Any, T], *, even_if_failed: bool = False) -> T:
        """Runs `coroutine` on the loop and waits; an exception of a signal handler ends the wait.

        Args:
            even_if_failed: run even after `fail()`, for farewells.

        Raises:
            JobFailed: another rank or an essential process failed meanwhile.
            MailboxClosed: the thread has ended.
        """
        job = _Job(coroutine, essential=not even_if_failed)
        try:
            self._call(self._begin, job)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise MailboxClosed("this session is closed: nothing can be called any more") from None
        try:
            return job.result.result()
        except concurrent.futures.CancelledError:
            raise JobFailed("the session was closed while a call was pending") from None
        except BaseException:
            if not job.result.done():
                self._call(self._cancel, job)
            raise

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs `coroutine` beside everything else, until it ends or the thread is closed. Returns
        at once, in a signal handler too. Does nothing where the thread has ended."""
        try:
            self._call(self._begin, _Job(coroutine, essential=False))
        except RuntimeError:  # the loop is closed
            coroutine.close()

    def fail(self, failure: JobFailed) -> None:
        """Ends blocked calls, now and later. Called on the loop; the first failure counts."""
        if self._failure is None:
            self._failure = failure
            for job in self._jobs:
                if job.essential:
                    self._cancel(job)

    def _call(self, function: Callable[[_Job[Any]], None], job: _Job[Any]) -> None:
        self._loop.call_soon_threadsafe(function, job)

    def _begin(self, job: _Job[Any]) -> None:
        if self._failure is not None and job.essential:
            job.coroutine.close()
            job.result.set_exception(self._failure)
            return
        self._jobs.add(job)
        job.task = self._tasks.create_task(self._settle(job))
        job.task.add_done_callback(lambda _task: self._finish(job))

    @staticmethod
    def _cancel(job: _Job[Any]) -> None:
        if job.task is not None:
            job.task.cancel()

    @staticmethod
    async def _settle(job: _Job[Any]) -> None:
        try:
            job.result.set_result(await job.coroutine)
        except Exception as error:  # noqa: BLE001 -- raised in the calling thread
            job.result.set_exception(error)

    def _finish(self, job: _Job[Any]) -> None:
        """Ends a job that was cancelled, perhaps before its first step."""
        self._jobs.discard(job)
        job.coroutine.close()
        if job.result.done():
            return
        if self._failure is not None and job.essential:
            job.result.set_exception(self._failure)
        else:
            job.result.cancel()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with asyncio.TaskGroup() as self._tasks:
            self._ready.set()
            await self._stop.wait()
            for job in list(self._jobs):
                self._cancel(job)
