from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from umbra.engines.embedded.embedded_settings import EmbeddedConfig
from umbra.engines.embedded.embedded_worker import EmbeddedWorker
from umbra.engines.shell.engine_core import Core, WeightUpdates
from umbra.engines.shell.engine_requests import EngineRequests, RequestCounts
from umbra.engines.shell.engine_shell import EngineShell
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.lora import LoraBase
from umbra.runtime.engine_api.token_deltas import END_TICK_S, DeltaColumns
from umbra.runtime.errors import EngineError

T = TypeVar("T")

_STOP_TIMEOUT_S: Final = 10.0
# Limit on waiting for a step in progress: longer than any sane step, shorter than the supervisor's.


class EmbeddedEngine(EngineShell["EmbeddedCore"]):
    """umbra's own engine as an actor, in plain torch, for CPU and CUDA. The settings are those of
    `EmbeddedConfig`, by name.

    All torch work happens in one compute thread, so the event loop answers at once whatever the
    model does. If the thread fails, `run` and all later calls and streams raise.
    """

    __signature__ = inspect.signature(EmbeddedConfig)

    def __init__(self, **settings: Any) -> None:
        config = EmbeddedConfig(**settings).with_local_model()
        requests = EmbeddedRequests(lambda: EmbeddedWorker(config), tick_ms=config.tick_ms)
        super().__init__(
            EmbeddedCore(requests.thread, config.lora_base),
            requests,
            EmbeddedUpdates(requests.thread),
            max_context_len=config.max_context_len,
            load_weights=config.load_weights,
        )


class EmbeddedCore(Core):
    name = "the embedded engine"
    truncates = True
    takes_forced = True
    keeps_requests_asleep = True

    def __init__(self, thread: ComputeThread, lora_base: LoraBase | None) -> None:
        super().__init__(lora_base)
        self._thread = thread

    @property
    def frees_memory_asleep(self) -> bool:
        """False: `memory` already reports the resident bytes."""
        return False

    async def start(self) -> None:
        await self._thread.start()
        self.vocab_size = await self._thread.run(lambda worker: worker.vocab_size)
        await self._note_memory()

    async def stop(self) -> None:
        await self._thread.stop()

    async def pause(self, *, keep: bool) -> None:
        await self._thread.run(lambda worker: worker.pause(keep=keep), flushes=True)
        self.is_paused = True

    async def resume(self) -> None:
        await self._thread.run(lambda worker: worker.resume())
        self.is_paused = False

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Frozen requests are recomputed after the next resume."""
        await self._thread.run(lambda worker: worker.sleep(level, tags))
        await self._note_memory()

    async def wake(self, tags: Sequence[str]) -> None:
        await self._thread.run(lambda worker: worker.wake(tags))
        await self._note_memory()

    async def _note_memory(self) -> None:
        self.memory = await self._thread.run(lambda worker: worker.memory())


class EmbeddedRequests(EngineRequests):
    def __init__(self, build: Callable[[], EmbeddedWorker], *, tick_ms: float) -> None:
        super().__init__()
        self.thread = ComputeThread(build, tick_s=tick_ms / 1000, on_batch=self._on_batch)
        self._ids: set[int] = set()

    @property
    def ids(self) -> Collection[int]:
        return self._ids

    async def run(self) -> None:
        raise await self.thread.failure()

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._ids.update(request.id for request in requests)
        self._note_ends()
        await self.thread.run(lambda worker: worker.core.add(requests))

    async def abort(self, ids: Collection[int]) -> None:
        await self.thread.run(lambda worker: worker.core.abort(ids), flushes=True)

    async def deliver(self) -> None:
        """Returns at once: a pause has flushed everything."""

    async def begin_update(self) -> None:
        """Requests share keys only where one pass computes them."""

    def commit_update(self, version: int) -> None:
        self.thread.post(lambda worker: worker.core.set_version(version))

    async def counts(self) -> RequestCounts:
        return await self.thread.run(lambda worker: worker.counts())

    def progress(self) -> int | None:
        """Steps of the model. A job for the compute thread may wait, and has limits of its own."""
        return self.thread.num_steps if self.thread.is_stepping else None

    def _forget(self, epoch: int) -> None:
        self._ids.clear()
        self.thread.begin_epoch(epoch)

    def _on_batch(self, batch: DeltaColumns, epoch: int) -> None:
        if epoch == self.stream.epoch:
            self.stream.put(batch)
            self._ids.difference_update(batch["finished_ids"].tolist())
            self._note_ends()


class EmbeddedUpdates(WeightUpdates):
    """Loads weights straight into the parameters, in the compute thread."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return await self._thread.run(lambda worker: worker.probe_import(allocations))

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        await self._thread.run(lambda worker: worker.begin_update(manifest, buckets))

    async def load(self) -> int:
        return await self._thread.run(lambda worker: worker.load_update())

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return await self._thread.run(lambda worker: worker.receiver.verify(regions))

    def stop(self) -> None:
        self._thread.end_waits()

    async def end(self) -> None:
        await self._thread.run(lambda worker: worker.receiver.end())

    async def abort(self) -> None:
        await self._thread.run(lambda worker: worker.receiver.abort())

    async def release(self) -> None:
        await self._thread.run(lambda worker: worker.receiver.release())

    async def close(self) -> None:
        """The process's end frees the mappings: unmapping here would wait for a hanging step."""
        self._thread.end_waits()


logger = logging.getLogger(__name__)

Job = Callable[[EmbeddedWorker], Any]


@dataclass(frozen=True, slots=True)
class _QueuedJob:
    job: Job
    future: asyncio.Future[Any]
    flushes: bool


class ComputeThread:
    """The one thread that owns an engine's torch work. Owns it, and in it the worker, until `stop`.

        event loop                               compute thread
          run(job) ── jobs ─────────────────────▶ between two steps: job(worker)
          future  ◀── call_soon_threadsafe ────── result or error
          on_batch ◀─ call_soon_threadsafe ────── token deltas: a batch a tick, or at an end
          failure()   ◀ call_soon_threadsafe ──── a step raised: the thread has ended

    Args:
        build: makes the worker; called in the thread.
        on_batch: called on the loop with a batch and the epoch that it belongs to.

    Attributes:
        num_steps, is_stepping: steps that have ended, and whether one is in progress; the loop
            may read both.
    """

    def __init__(
        self,
        build: Callable[[], EmbeddedWorker],
        *,
        tick_s: float,
        on_batch: Callable[[DeltaColumns, int], None],
    ) -> None:
        self._build = build
        self._tick_s = tick_s
        self._on_batch = on_batch
        self._jobs: queue.SimpleQueue[_QueuedJob | None] = queue.SimpleQueue()
        self._pending: set[asyncio.Future[Any]] = set()
        self._error: Exception | None = None
        self._has_failed = asyncio.Event()
        self._worker: EmbeddedWorker | None = None
        self.num_steps = 0
        self.is_stepping = False
        self._epoch = 0  # of the consumer that batches are made for; set in the thread
        self._thread = threading.Thread(target=self._main, name="engine-compute", daemon=True)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._built

    async def stop(self) -> None:
        self._jobs.put(None)
        self.end_waits()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._ended
            self._thread.join(_STOP_TIMEOUT_S)

    def end_waits(self) -> None:
        """Makes a `load` that waits for ranks raise WeightSyncError soon."""
        if self._worker is not None:
            self._worker.receiver.stop()

    async def failure(self) -> Exception:
        await self._has_failed.wait()
        assert self._error is not None
        return self._error

    async def run(self, job: Callable[[EmbeddedWorker], T], *, flushes: bool = False) -> T:
        """Runs `job` in the thread between two steps, even if the caller is cancelled. With
        `flushes`, `on_batch` has had all tokens and finishes when it returns. Raises EngineError if
        the thread failed."""
        if self._error is not None:
            raise self._error
        future: asyncio.Future[T] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._jobs.put(_QueuedJob(job, future, flushes))
        return await future

    def post(self, job: Job) -> None:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(_log_error)
        self._jobs.put(_QueuedJob(job, future, flushes=False))

    def begin_epoch(self, epoch: int) -> None:
        def forget(worker: EmbeddedWorker) -> None:
            worker.core.forget()
            self._epoch = epoch

        self.post(forget)

    # The methods from here to `_call_soon` run in the thread.

    def _main(self) -> None:
        try:
            worker = self._worker = self._build()
        except Exception as error:  # noqa: BLE001 - raised to the caller of `start`
            self._call_soon(_fail_future, self._built, error)
        else:
            self._call_soon(_set_result, self._built, None)
            try:
                self._serve(worker)
            except Exception as error:  # a step failed: the engine is broken
                logger.exception("the engine's compute thread failed")
                self._call_soon(self._fail, error)
        self._call_soon(_set_result, self._ended, None)

    def _serve(self, worker: EmbeddedWorker) -> None:
        last_flush = 0.0
        while True:
            can_step = worker.can_step
            while not can_step or not self._jobs.empty():
                item = self._jobs.get()
                if item is None:
                    return
                self._run_job(worker, item)
                can_step = worker.can_step
                if not can_step and self._jobs.empty():
                    self._flush(worker)
            self.is_stepping = True
            worker.core.step()
            self.is_stepping = False
            self.num_steps += 1
            now = time.monotonic()
            tick_s = min(END_TICK_S, self._tick_s) if worker.core.has_finishes else self._tick_s
            if now >= last_flush + tick_s or not worker.can_step:
                self._flush(worker)
                last_flush = now

    def _flush(self, worker: EmbeddedWorker) -> None:
        batch = worker.core.take_deltas()
        if batch is not None:
            self._call_soon(self._on_batch, batch, self._epoch)

    def _run_job(self, worker: EmbeddedWorker, queued: _QueuedJob) -> None:
        try:
            result = queued.job(worker)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self._call_soon(_fail_future, queued.future, error)
            return
        if queued.flushes:
            self._flush(worker)
        self._call_soon(_set_result, queued.future, result)

    def _call_soon(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody needs the call
            self._loop.call_soon_threadsafe(callback, *args)

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        failure = EngineError(f"the engine's compute thread failed: {reason}")
        failure.__cause__ = error
        self._error = failure
        for future in list(self._pending):
            _fail_future(future, failure)
        self._has_failed.set()


def _set_result(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail_future(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _log_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.error("a posted job failed", exc_info=future.exception())
