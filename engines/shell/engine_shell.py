from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, nullcontext
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, cast

from umbra.engines.shell.engine_core import Core, WeightUpdates
from umbra.engines.shell.engine_requests import EngineRequests
from umbra.runtime.engine_api.engine_protocol import EngineStats, PauseMode
from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request
from umbra.runtime.engine_api.lifecycle import ALL_TAGS, EngineGate, EngineState, SleepLevel, Tag
from umbra.runtime.engine_api.token_deltas import DeltaColumns
from umbra.runtime.errors import EngineError, WakeError, WeightSyncError
from umbra.runtime.process.descendants import own_tree_nbytes
from umbra.runtime.tracing.spans import gauge, span
from umbra.runtime.waiting import first_of
from umbra.runtime.weights.manifest import Manifest

logger = logging.getLogger(__name__)

_Core = TypeVar("_Core", bound=Core)
_T = TypeVar("_T")
_PREPARED_INTERVAL_S: Final = 0.005
# Interval of asking whether an update is prepared. Each question waits for the engine's current
# step and delays the next one: shorter intervals delay tokens, longer ones the update.


class EngineShell(Generic[_Core]):
    """The shell of every engine: umbra's protocol, `engine_protocol.Engine`, over a core.

        Engine protocol ──▶ EngineShell ──▶ Core             starts, pauses, sleeps, wakes
                            gate, order     EngineRequests   requests in, tokens out
                            of calls        WeightUpdates    new weights in

    Entering it starts the core, leaving it ends it. With `load_weights` the core starts with
    weights, and the engine serves them as version 0.
    """

    __signature__: ClassVar[inspect.Signature | None]

    def __init__(
        self,
        core: _Core,
        requests: EngineRequests,
        weights: WeightUpdates,
        *,
        max_context_len: int,
        load_weights: bool,
    ) -> None:
        self._core = core
        self._requests = requests
        self._weights = weights
        self._max_context_len = max_context_len
        self._load_weights = load_weights
        self._gate = EngineGate()
        self._drain_is_over = asyncio.Event()
        self._changes = Changes()  # of the core's state, and of its requests
        self._prepared_version: int | None = None  # of an update that may be loaded
        self._can_commit = False  # the core has the weights of the update in progress
        self._owned = AsyncExitStack()
        gauge("requests", lambda: {"in flight": len(requests.ids)})

    def __init_subclass__(cls) -> None:
        """Lets a subclass with an `__init__` of its own take what that says."""
        if "__init__" in vars(cls) and "__signature__" not in vars(cls):
            cls.__signature__ = None

    def check_options(self) -> str:
        return self._core.check_options()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as owned:
            owned.push_async_callback(self._stop_core)
            await self._start_core()
            owned.push_async_callback(self._weights.close)
            await owned.enter_async_context(self._changes)
            self._owned = owned.pop_all()
        if self._load_weights:
            self._gate.start_serving(0)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._owned.__aexit__(*exc_info)

    async def _start_core(self) -> None:
        with span("start the engine"):
            await self._core.start()

    async def _stop_core(self) -> None:
        await self._core.stop()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._requests.run())
                tasks.create_task(self._fail_with_core())
        except ExceptionGroup as group:
            error = _first_error(group)
            if not isinstance(error, EngineError):
                error = EngineError(f"{self._core.name} failed: {type(error).__name__}: {error}")
            self._requests.stream.fail(error)
            raise error from error.__cause__

    async def _fail_with_core(self) -> None:
        await self._core.died.wait()
        raise EngineError(f"a process of {self._core.name} has ended; the log has the reason")

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._gate.admit()
        parsed = [self._parse(raw) for raw in requests]
        epoch = self._requests.stream.epoch  # another consumer may attach meanwhile
        await self._changes.make(lambda: self._add(parsed, epoch))

    def _parse(self, raw: Mapping[str, Any]) -> GenerationRequest:
        request = parse_request(
            raw,
            max_context_len=self._max_context_len,
            vocab_size=self._core.vocab_size,
            lora_names=self._core.lora_names,
        )
        if (request.top_p < 1 or request.top_k) and not self._core.truncates:
            raise ValueError(
                f"request {request.id}: top_p {request.top_p} and top_k {request.top_k}, but "
                f"{self._core.name} samples from the whole distribution; use 1 and 0"
            )
        if request.forced.size and not self._core.takes_forced:
            raise ValueError(
                f"request {request.id}: {self._core.name} gives no logprobs of forced tokens"
            )
        self._core.check_request(request)
        return request

    async def _add(self, requests: list[GenerationRequest], epoch: int) -> None:
        if epoch != self._requests.stream.epoch:  # the consumer of these requests has detached
            return
        self._gate.admit()  # it may have been paused meanwhile
        ids = {request.id for request in requests}
        taken = sorted(ids.intersection(self._requests.ids))
        if taken or len(ids) < len(requests):
            raise ValueError(f"request ids must be unique; already here: {taken or 'repeated'}")
        await self._requests.add(requests)

    async def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        async with aclosing(self._requests.stream.read()) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, ids: Sequence[int] | None) -> int:
        known = self._requests.ids
        chosen = list(known) if ids is None else [i for i in dict.fromkeys(ids) if i in known]
        if chosen:
            await self._requests.abort(chosen)
        return len(chosen)

    async def pause(self, mode: PauseMode) -> None:
        if mode not in ("abort", "keep", "drain"):
            raise ValueError(f"pause mode must be abort, keep or drain, got {mode!r}")
        if mode == "drain":
            await self._drain()
            return
        self._gate.pause()
        self._drain_is_over.set()
        await self._changes.make(
            lambda: self._pause_core(keep=mode == "keep"), span("pause", mode=mode)
        )

    async def _drain(self) -> None:
        self._gate.drain()
        if self._gate.is_draining:
            self._drain_is_over.clear()
            await first_of(self._requests.all_ended, self._drain_is_over)
        if self._gate.is_draining:
            self._gate.pause()

    async def _pause_core(self, *, keep: bool) -> None:
        self._gate.pause()  # an earlier change may have resumed it since the call
        await self._core.pause(keep=keep)
        await self._requests.deliver()
        if not keep:
            await self.abort(None)  # nothing is left, whatever the core's pause did

    async def resume(self) -> None:
        await self._changes.make(self._resume)

    async def _resume(self) -> None:
        self._gate.check_resume()
        await self._wake(["kv_cache"])
        with span("resume"):
            self._gate.resume()
            self._drain_is_over.set()
            if self._core.is_paused:
                await self._core.resume()

    async def sleep(self, level: SleepLevel, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        traced = span("sleep", level=level, tags=", ".join(tags))
        await self._changes.make(lambda: self._put_to_sleep(level, tags), traced)

    async def _put_to_sleep(self, level: SleepLevel, tags: Sequence[Tag]) -> None:
        if not self._requests.ids:
            self._gate.pause()
        self._gate.sleep(level, tags)
        await self._pause_core(keep=self._core.keeps_requests_asleep)
        self._prepared_version = None
        await self._weights.release()
        await self._core.sleep(level, tags)

    async def wake(self, tags: Sequence[Tag]) -> None:
        await self._changes.make(lambda: self._wake(tags))

    async def _wake(self, tags: Sequence[Tag]) -> None:
        sleeping = sorted(self._gate.wake(tags), reverse=True)
        if sleeping:
            with span("wake", tags=", ".join(sleeping)):
                try:
                    await self._core.wake(sleeping)
                except Exception as error:
                    raise WakeError(f"{type(error).__name__}: {error}") from error
            self._gate.woken()

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return await self._changes.make(lambda: self._weights.probe_import(allocations))

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None:
        """Other changes, such as new requests, run while the update is being prepared."""
        await self._changes.make(lambda: self._prepare_update(version, manifest, buckets))
        while self._prepared_version == version:
            if await self._changes.make(self._weights.is_prepared):
                return
            await asyncio.sleep(_PREPARED_INTERVAL_S)

    async def _prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None:
        self._prepared_version = None
        self._core.check_update(Manifest.from_wire(manifest))
        await self._weights.begin(manifest, buckets)
        self._prepared_version = version

    async def load(self) -> dict[str, int]:
        """Frozen requests keep their KV cache, so they continue with keys of the older weights."""
        version, self._prepared_version = self._prepared_version, None
        if version is None:
            raise WeightSyncError("no update is in progress; prepare_update comes first")
        return {"nbytes": await self._changes.make(lambda: self._load(version))}

    async def _load(self, version: int) -> int:
        await self._wake(["weights"])
        self._gate.begin_update(version, is_idle=not self._requests.ids)
        self._can_commit = False
        with span("load weights", version=version):
            if not self._core.is_paused:
                await self._pause_core(keep=True)
            await self._requests.begin_update()
            nbytes = await self._weights.load()
        self._can_commit = True
        return nbytes

    async def verify_update(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        self._check_updating()
        return await self._changes.make(lambda: self._verify_update(regions), span("verify"))

    async def _verify_update(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        self._check_loaded()
        self._can_commit = False
        mismatches = await self._weights.verify(regions)
        self._can_commit = not mismatches
        return mismatches

    async def commit_update(self) -> None:
        self._check_updating()
        self._check_loaded()
        await self._changes.make(self._commit_update)

    async def _commit_update(self) -> None:
        self._requests.commit_update(self._gate.commit_update())
        await self._weights.end()
        await self._resume()

    async def abort_update(self) -> None:
        self._weights.stop()
        await self._changes.make(self._abort_update)

    async def _abort_update(self) -> None:
        self._prepared_version = None
        await self._weights.abort()
        self._gate.abort_update()

    def _check_loaded(self) -> None:
        if not self._can_commit:
            raise EngineError("the weights are not loaded, or differ from those that were sent")

    def _check_updating(self) -> None:
        if self._gate.state != EngineState.UPDATING:
            raise WeightSyncError("no update is in progress; load comes first")

    async def stats(self) -> EngineStats:
        """`resident_nbytes` includes the engine's own processes."""
        counts = await self._requests.counts()
        version, awake = self._gate.version, self._gate.awake
        if not self._core.frees_memory_asleep:
            awake = ALL_TAGS
        memory = self._core.memory
        return EngineStats(
            **counts,
            version=-1 if version is None else version,
            resident_nbytes=own_tree_nbytes(),
            weights_nbytes=memory["weights_nbytes"] if "weights" in awake else 0,
            kv_nbytes=memory["kv_nbytes"] if "kv_cache" in awake else 0,
        )

    def progress(self) -> int | None:
        return self._requests.progress()


def _first_error(error: Exception) -> Exception:
    if not isinstance(error, ExceptionGroup):
        return error
    group = cast("ExceptionGroup[Exception]", error)
    return _first_error(group.exceptions[0])


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
