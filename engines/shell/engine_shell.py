"""A foreign inference engine as an engine actor: umbra's protocol over a `Core`.

Methods are those of `engine_protocol.Engine`. What differs from the embedded engine: frozen
requests do not outlive a sleep, which ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from umbra.engines.shell.delta_stream import DeltaStream
from umbra.engines.shell.engine_changes import Changes
from umbra.engines.shell.engine_core import Core
from umbra.engines.shell.engine_gate import EngineGate
from umbra.engines.shell.resident_memory import tree_resident_nbytes
from umbra.engines.shell.running_requests import RunningRequest, RunningRequests
from umbra.engines.shell.warm_up import warm_up
from umbra.engines.shell.weight_image import WeightImage
from umbra.engines.shell.weight_import import WeightImport
from umbra.runtime.engine_api.delta_buffer import END_TICK_S, DeltaBuffer, DeltaColumns
from umbra.runtime.engine_api.engine_protocol import EngineStats, PauseMode
from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request
from umbra.runtime.engine_api.lifecycle import ALL_TAGS, SleepLevel, Tag
from umbra.runtime.errors import EngineError

_T = TypeVar("_T")

_QUIET_PASSES: Final = 3
# Passes of the event loop without a token after which the engine's frontend has handled all that
# had come: vLLM's handles a part in each.


class AdapterEngine:
    """Entering it starts the foreign engine, leaving it ends its processes. `run()` raises when
    they fail.

    Args:
        tick_ms: the time between two deltas, where no request ends that the core tells of.
        load_weights: the core starts with weights, and serves as version 0.
    """

    def __init__(
        self,
        core: Core,
        *,
        max_num_seqs: int,
        max_context_len: int,
        tick_ms: float,
        load_weights: bool,
    ) -> None:
        self._core = core
        self._max_num_seqs = max_num_seqs
        self._max_context_len = max_context_len
        self._tick_s = tick_ms / 1000
        self._load_weights = load_weights
        self._gate = EngineGate()
        self._buffer = DeltaBuffer()
        self._running = RunningRequests(self._buffer, core.name)
        self._stream = DeltaStream(self._forget)
        self._has_work = asyncio.Event()
        self._is_quiet = asyncio.Event()  # a drain is over
        self._serials = itertools.count()
        self._doomed: list[str] = []  # their consumer has gone
        self._is_doomed = asyncio.Event()
        self._changes = Changes()  # of the core's state, and of its requests
        self._num_updates = 0  # committed
        self._older_version = 0  # held before the update in progress, or the last one
        self._is_loaded = False  # the weights of the update in progress are in the core
        self._is_verified = False
        self._image = WeightImage()
        self._import: WeightImport | None = None  # an update that takes no image
        self._image_thread = ThreadPoolExecutor(1, thread_name_prefix="weight-image")
        self._owned = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as owned:
            owned.push_async_callback(self._stop_core)
            await self._start_core()
            owned.push_async_callback(self._close_image)
            await owned.enter_async_context(self._changes)
            self._owned = owned.pop_all()
        if self._load_weights:
            self._gate.start_serving(0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._owned.__aexit__(kind, error, trace)

    async def _start_core(self) -> None:
        await self._core.start()
        await warm_up(self._core)

    async def _stop_core(self) -> None:
        await self._core.stop()

    async def _close_image(self) -> None:
        self._image.stop()
        try:
            await self._in_image_thread(self._image.close)
        finally:
            self._image_thread.shutdown()

    async def run(self) -> None:
        """Until cancelled; raises EngineError when the foreign engine fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_tokens_forever())
                tasks.create_task(self._abort_doomed_forever())
                tasks.create_task(self._fail_with_core())
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if not isinstance(error, EngineError):
                error = EngineError(f"{self._core.name} failed: {type(error).__name__}: {error}")
            self._stream.fail(error)
            raise error from None

    async def _take_tokens_forever(self) -> None:
        while True:
            await self._has_work.wait()
            await self._tick()
            self._take_tokens()

    async def _tick(self) -> None:
        """Tokens gather in the core meanwhile; a request that has ended waits for few others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._tick_s):
                await self._core.ended.wait()
                await asyncio.sleep(END_TICK_S)
        self._core.ended.clear()

    async def _abort_doomed_forever(self) -> None:
        while True:
            await self._is_doomed.wait()
            self._is_doomed.clear()
            doomed, self._doomed = self._doomed, []
            await self._core.abort(doomed)

    async def _fail_with_core(self) -> None:
        await self._core.died.wait()
        raise EngineError(f"a process of {self._core.name} has ended; the log says why")

    # -- tokens --------------------------------------------------------------------------

    def _take_tokens(self) -> int:
        """All tokens that have come go out, as made under the version held; their number.

        (Between two versions some that the older one made may come.)
        """
        held = self._gate.version
        version = self._older_version if held is None else held
        count = self._running.collect(version, self._older_version)
        batch = self._buffer.take()
        if batch is not None:
            self._stream.put(batch, self._stream.epoch)
        self._settle()
        return count

    async def _take_last_tokens(self) -> None:
        """The same for those still on their way through the engine's frontend."""
        quiet = 0
        while quiet < _QUIET_PASSES:
            quiet = 0 if self._take_tokens() else quiet + 1
            await asyncio.sleep(0)

    def _settle(self) -> None:
        """Brings the events in line with the state; called after every change."""
        if self._gate.is_draining and not self._running:
            self._gate.pause()
        _assign(self._has_work, len(self._running) > 0)
        _assign(self._is_quiet, not self._gate.is_draining)

    def _forget(self, _epoch: int) -> None:
        self._doomed += self._running.clear()
        self._buffer.clear()
        if self._doomed:
            self._is_doomed.set()
        self._settle()

    # -- requests ------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._gate.admit()
        parsed = [self._parse(raw) for raw in requests]
        epoch = self._stream.epoch  # now: until its turn comes, another consumer may
        await self._changes.make(lambda: self._add(parsed, epoch))

    def _parse(self, raw: Mapping[str, Any]) -> GenerationRequest:
        request = parse_request(
            raw,
            max_context_len=self._max_context_len,
            vocab_size=self._core.vocab_size,
            lora_names=self._core.lora_names,
        )
        self._core.check_request(request)
        return request

    async def _add(self, requests: list[GenerationRequest], epoch: int) -> None:
        if epoch != self._stream.epoch:  # the consumer that they were for has gone
            return
        self._gate.admit()  # it may have been paused meanwhile
        ids = [request.id for request in requests]
        taken = sorted(i for i in set(ids) if i in self._running)
        if taken or len(set(ids)) < len(ids):
            raise ValueError(f"request ids must be unique; already here: {taken or 'repeated'}")
        added: list[RunningRequest] = []
        num_running = min(len(self._running) + len(requests), self._max_num_seqs)
        try:
            for request in requests:
                # No key is the beginning of another: SGLang would end both.
                key = f"{next(self._serials):012d}-{request.id}"
                output = await self._core.add(key, request, self._cache_salt, num_running)
                added.append(RunningRequest(request=request, key=key, output=output))
        except BaseException:
            self._doom(added)
            raise
        if epoch != self._stream.epoch:  # it has gone meanwhile
            self._doom(added)
            return
        for running in added:
            self._running.add(running)
        self._settle()

    def _doom(self, requests: list[RunningRequest]) -> None:
        self._doomed += [running.key for running in requests]
        self._is_doomed.set()

    @property
    def _cache_salt(self) -> str:
        """A cached prefix of older weights is of no use to newer ones."""
        return f"weights-{self._num_updates}"

    async def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        async with aclosing(self._stream.read()) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, ids: Sequence[int] | None) -> int:
        """What the engine has sampled but not yet delivered is lost; it is the end of each."""
        keys = self._running.keys(ids)
        if keys:
            await self._core.abort(keys)
            self._take_tokens()
        return len(keys)

    async def pause(self, mode: PauseMode) -> None:
        if mode not in ("abort", "keep", "drain"):
            raise ValueError(f"pause mode must be abort, keep or drain, got {mode!r}")
        if mode == "drain":
            self._gate.drain()
            self._settle()
            await self._is_quiet.wait()
            return
        self._gate.pause()
        self._settle()
        await self._changes.make(lambda: self._pause_core(keep=mode == "keep"))

    async def _pause_core(self, *, keep: bool) -> None:
        await self._core.pause(keep=keep)
        await self._take_last_tokens()
        if not keep:
            await self.abort(None)  # nothing is left, whatever the core made of the pause

    async def resume(self) -> None:
        await self._changes.make(self._resume)

    async def _resume(self) -> None:
        self._gate.resume()
        if self._core.is_paused:
            await self._core.resume()
        self._settle()

    # -- memory --------------------------------------------------------------------------

    async def sleep(self, level: SleepLevel) -> None:
        """Ends frozen requests."""
        if not self._running:
            self._gate.pause()
        self._gate.sleep(level)
        await self._changes.make(lambda: self._lull_core(level))

    async def _lull_core(self, level: SleepLevel) -> None:
        await self._pause_core(keep=False)
        await self._in_image_thread(self._image.close)
        await self._core.sleep(level)

    async def wake(self, tags: Sequence[Tag]) -> None:
        wanted = self._gate.wake(tags)
        if wanted:
            await self._changes.make(lambda: self._wake_core(wanted))

    async def _wake_core(self, tags: Collection[Tag]) -> None:
        await self._core.wake(sorted(tags, reverse=True))
        self._gate.woken()

    # -- weights -------------------------------------------------------------------------

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return await self._changes.make(lambda: self._core.probe_import(allocations))

    async def begin_update(
        self, version: int, manifest: Mapping[str, Any], buckets: Mapping[str, Any]
    ) -> None:
        """Frozen requests keep their KV cache, so they go on with keys of the older weights."""
        held = self._gate.version
        self._gate.begin_update(version, is_idle=not self._running)
        self._older_version = self._older_version if held is None else held
        await self._changes.make(lambda: self._begin_update(manifest, buckets))

    async def _begin_update(self, manifest: Mapping[str, Any], buckets: Mapping[str, Any]) -> None:
        self._is_loaded = self._is_verified = False
        if not self._core.is_paused:
            await self._pause_core(keep=True)
        if buckets["transport"] == "cuda_ipc":
            await self._in_image_thread(self._image.close)
            self._import = WeightImport(manifest, buckets)
            return
        self._import = None
        await self._in_image_thread(lambda: self._image.begin(manifest, buckets))

    async def load(self) -> dict[str, int]:
        """When it returns, the model has the weights."""
        self._gate.touch()
        update = self._import
        if update is None:
            nbytes = await self._in_image_thread(self._image.load)
            await self._changes.make(lambda: self._core.load_weights(self._image.describe()))
        else:
            read = await self._changes.make(lambda: self._core.load_weights(update.description))
            nbytes = update.note(read)
        self._is_loaded = True
        return {"nbytes": nbytes}

    async def finish_update(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Verifies what the model was loaded with."""
        return await self._changes.make(lambda: self._finish_update(regions))

    async def _finish_update(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        if self._import is not None:
            report = self._import.finish(regions)
        else:
            report = await self._in_image_thread(lambda: self._image.finish(regions))
        self._is_verified = self._is_loaded and not report["mismatches"]
        return report

    async def commit_update(self) -> None:
        if self._import is None:
            self._image.check_open()
        if not self._is_verified:
            raise EngineError("the update has not been verified: load and finish_update come first")
        self._gate.commit_update()
        self._num_updates += 1
        self._import = None
        await self._in_image_thread(self._image.end)

    async def abort_update(self) -> None:
        self._image.stop()
        await self._changes.make(self._abort_update)

    async def _abort_update(self) -> None:
        await self._in_image_thread(self._image.end)
        self._import = None
        self._gate.abort_update()

    async def _in_image_thread(self, job: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._image_thread, job)

    async def stats(self) -> EngineStats:
        """`resident_nbytes` is of the engine's own processes, too."""
        version, awake = self._gate.version, self._gate.awake
        if not self._core.frees_memory_asleep:
            awake = ALL_TAGS
        num_running = min(len(self._running), self._max_num_seqs)
        return EngineStats(
            running=num_running,
            waiting=len(self._running) - num_running,
            tokens_total=self._running.num_tokens_total,
            kv_tokens_used=sum(running.num_tokens for running in self._running),
            version=-1 if version is None else version,
            resident_nbytes=tree_resident_nbytes(),
            weights_nbytes=self._core.memory["weights_nbytes"] if "weights" in awake else 0,
            kv_nbytes=self._core.memory["kv_nbytes"] if "kv_cache" in awake else 0,
        )

    def progress(self) -> int | None:
        """Tokens made, while there are requests to make them for."""
        is_idle = not self._running or self._core.is_paused
        return None if is_idle else self._running.num_tokens_total


def _assign(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()
