from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.engine_api.pool_settings import Transport
from umbra.runtime.errors import UmbraError, WakeError, WeightSyncError
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.sync_state import (
    EngineCutOff,
    EngineDone,
    EngineFailed,
    Event,
    Phase,
    SyncState,
    SyncStep,
)
from umbra.runtime.weights.links.link_plan import LinkProgress
from umbra.runtime.weights.transport import Layout, TransferProgress

logger = logging.getLogger(__name__)

_SETTLE_TIMEOUT_S: Final = 10.0
# Limit of each call after the decision (commit, revert), whatever is left of the lease: a short one
# kills engines that were only slow, as to wake a large KV cache, a long one delays the next sync.
# Also how much longer than the lease a load may take to notice that the sync was aborted.
_ABORTED_LIMIT_S: Final = 40.0
# Limit of an engine's request in progress when the sync is aborted. Longer: an elastic restart,
# which gives the pool 60 s, ends the job. Shorter: engines that finish loading a model are killed.
_ENGINE_SHARE: Final = 0.75
# Share of the sync's remaining time that an engine has for a request, or for a load without
# progress. A larger share leaves too little for the others when it fails; a smaller one
# replaces slow engines.
_RANK_NEWS_LIMIT_S: Final = 3.0
# How much later than an engine the supervisor may notice that a rank is lost. Shorter: engines are
# killed for a rank's end. Longer: an engine whose own connection broke delays the others.
_WATCH_INTERVAL_S: Final = 0.1
_MIN_TIMEOUT_S: Final = 3 * _WATCH_INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSync:
    """The coordinator's part of a sync, once the layout is known."""

    engines: Mapping[int, PoolEngine]
    transport: Transport
    bucket_nbytes: int
    layout: Layout
    has_checksums: bool

    @property
    def progress(self) -> TransferProgress:
        return self.layout.progress

    @property
    def links(self) -> LinkProgress | None:
        """The progress, if ranks and engines are on several nodes."""
        return self.progress if isinstance(self.progress, LinkProgress) else None

    def describe(self, engine: int, timeout_s: float) -> dict[str, Any]:
        details = self.layout.engine_details[engine]
        return {
            "bucket_nbytes": self.bucket_nbytes,
            **details,
            "progress": {**details["progress"], "timeout_s": timeout_s},
        }


class Lease:
    """The time that a sync may take. Its end never moves to a later time."""

    def __init__(self) -> None:
        self.length_s = float("inf")
        self.changed = asyncio.Event()
        self._end = float("inf")

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def shorten(self, length_s: float) -> None:
        end = time.monotonic() + length_s
        if end < self._end:
            self._end, self.length_s = end, length_s
            self.changed.set()


class EngineSync:
    """One engine in a sync: takes the steps that the state asks for one after the other, and feeds
    it the outcomes.

    A revert therefore never overtakes a load that is still copying. An engine that makes no
    progress in a load although there are buckets to load has failed. The ranks' `lease`
    limits the engine.
    """

    def __init__(
        self,
        engine: PoolEngine,
        number: int,
        *,
        opened: OpenedSync,
        state: SyncState,
        lease: Lease,
        feed: Callable[[Event], None],
        pause_mode: str,
    ) -> None:
        self.number = number
        self.load_s = 0.0
        self.prepared_at = 0.0
        self._engine = engine
        self.incarnation = engine.incarnation
        self._was_serving = engine.lifecycle.state == EngineState.SERVING
        self._opened = opened
        self._state = state
        self._lease = lease
        self._feed = feed
        self._pause_mode = pause_mode
        self._asked: asyncio.Queue[SyncStep | None] = asyncio.Queue()
        self._was_aborted = asyncio.Event()
        self._step_timeout: asyncio.Timeout | None = None  # of the step in progress
        self._is_draining = False
        self._drain_was_ended = False

    def ask(self, step: SyncStep | None) -> None:
        """None ends `run`."""
        self._asked.put_nowait(step)

    def abort(self) -> None:
        """Shortens the step in progress, because the sync was aborted; a drain ends at once."""
        self._was_aborted.set()
        self._drain_was_ended = self._is_draining
        left_s = 0.0 if self._is_draining else _ABORTED_LIMIT_S
        timeout, limit = self._step_timeout, asyncio.get_running_loop().time() + left_s
        if timeout is not None and not timeout.expired():
            timeout.reschedule(min(timeout.when() or limit, limit))

    def discard(self, reason: str) -> None:
        """Kills the engine that took part, and lets the ranks continue without it."""
        self.ask(None)
        engine = self._engine
        is_same = engine.incarnation == self.incarnation
        if is_same and engine.lifecycle.state != EngineState.DEAD:
            engine.kill(f"weight sync: {reason}")
        self._opened.progress.dismiss(self.number)  # killed first: it reads no bucket any more

    async def run(self) -> None:
        while (step := await self._asked.get()) is not None:
            await self._take(step)

    async def _take(self, step: SyncStep) -> None:
        name, timeout_s = self._engine.name, self._timeout_s()
        precedes_verify = step in (SyncStep.PREPARE, SyncStep.LOAD)
        if step == SyncStep.LOAD and self._is_cut_off():
            self._leave()
            return
        try:
            self._check_incarnation()
            async with asyncio.timeout(timeout_s) as self._step_timeout:
                try:
                    answer = await self._perform(step, timeout_s, self._step_timeout)
                finally:
                    self._step_timeout = None
        except TimeoutError:
            if precedes_verify and self._drain_was_ended:
                return  # the revert that follows resumes the engine
            reason = f"no answer or no progress within {timeout_s:.3g} s"
            if self._opened.progress.is_aborted:
                reason = "it did not stop in time after the sync was aborted"
            elif timeout_s != _SETTLE_TIMEOUT_S:
                reason += f", {_ENGINE_SHARE:.0%} of what was left of pool.sync_timeout_s"
        except UmbraError as error:
            if precedes_verify and self._is_cut_off():
                self._leave()
                return
            if not isinstance(error, WakeError) and await self._is_stopped_by_abort(step):
                return  # the revert that follows finds its state
            reason = str(error)
        except Exception as error:  # an engine must not end the supervisor
            logger.exception("%s of %s failed unexpectedly", step, name)
            reason = repr(error)
        else:
            self._feed(EngineDone(name, step, answer))
            return
        self._feed(EngineFailed(name, f"{step}: {reason}"))

    async def _perform(self, step: SyncStep, timeout_s: float, timeout: asyncio.Timeout) -> object:
        engine = self._engine
        match step:
            case SyncStep.PREPARE:
                return await self._prepare(timeout_s)
            case SyncStep.LOAD:
                return await self._load(timeout)
            case SyncStep.VERIFY:
                regions: list[list[int | None]] = [list(r) for r in self._state.regions]
                return await engine.verify_update(regions, timeout_s)
            case SyncStep.COMMIT:
                return await engine.commit_update(self._state.version, timeout_s)
            case SyncStep.REVERT:
                is_touched = engine.lifecycle.state == EngineState.UPDATING
                await engine.abort_update(timeout_s)
                if self._was_serving and not is_touched:
                    await engine.resume(timeout_s)
                return None

    async def _prepare(self, timeout_s: float) -> None:
        assert self._state.manifest is not None
        engine, version = self._engine, self._state.version
        buckets = self._opened.describe(self.number, self._lease.left_s + _SETTLE_TIMEOUT_S)
        manifest = self._state.manifest.to_wire()
        await engine.prepare_update(version, manifest, buckets, timeout_s)  # may still generate
        if self._opened.links is None or not self._was_serving:
            await self._pause(timeout_s)
        self.prepared_at = time.monotonic()

    async def _pause(self, timeout_s: float) -> None:
        if self._opened.progress.is_aborted or self._is_cut_off():
            raise WeightSyncError("the sync ended for the engine before it was paused")
        self._is_draining = self._pause_mode == "drain"
        try:
            await self._engine.pause(self._pause_mode, timeout_s)
        finally:
            self._is_draining = False

    async def _load(self, timeout: asyncio.Timeout) -> object:
        engine, version = self._engine, self._state.version
        if self._opened.links is not None and self._was_serving:
            await self._receive(timeout, self._opened.links)
            timeout_s = self._timeout_s()
            timeout.reschedule(asyncio.get_running_loop().time() + timeout_s)
            await self._pause(timeout_s)
        begun_at = time.monotonic()
        with self._watching(timeout, wakes="weights" not in engine.lifecycle.awake):
            loaded = await engine.load(version, self._lease.left_s + _SETTLE_TIMEOUT_S)
        self.load_s = time.monotonic() - begun_at
        return loaded

    async def _receive(self, timeout: asyncio.Timeout, links: LinkProgress) -> None:
        """Returns once the image of the engine's node is filled, or is known to stay incomplete.

        The engine generates meanwhile. If it receives for its node, it must make progress.
        """
        loop, engine, num_seen = asyncio.get_running_loop(), self._engine, -1
        node = links.node_of(self.number)
        while not (node.may_load(self.number) or links.is_aborted):
            changed = node.changed
            if engine.lifecycle.state == EngineState.DEAD:
                raise WeightSyncError(f"{engine.name}#{self.incarnation} has ended")
            if not timeout.expired():
                if not node.has_to_receive(self.number):
                    timeout.reschedule(None)
                elif timeout.when() is None or node.num_filled != num_seen:
                    timeout.reschedule(loop.time() + max(_MIN_TIMEOUT_S, self._timeout_s()))
            num_seen = node.num_filled
            with suppress(TimeoutError):  # the engine's own end is no change of the image
                async with asyncio.timeout(_WATCH_INTERVAL_S):
                    await changed.wait()
        self._check_incarnation()

    @contextmanager
    def _watching(self, timeout: asyncio.Timeout, *, wakes: bool) -> Generator[None]:
        """Resets a load's timeout at each progress; sets none while it waits for others. With
        `wakes`, the engine first takes memory for its weights."""
        loop, num_buckets = asyncio.get_running_loop(), self._opened.layout.num_buckets
        progress, num_seen = self._opened.progress, 0
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal num_seen, timer
            num_loaded = progress.num_loaded(self.number)
            ends_at = timeout.when()
            limit_s = max(_MIN_TIMEOUT_S, self._timeout_s())
            if progress.is_aborted or progress.is_cut_off(self.number):
                # The library's work before the first bucket and after the last cannot be stopped.
                is_at_work = num_loaded == num_buckets or (wakes and num_loaded == 0)
                limit = loop.time() + (_ABORTED_LIMIT_S if is_at_work else _SETTLE_TIMEOUT_S)
                ends_at = limit if ends_at is None else min(ends_at, limit)
            elif num_loaded < num_buckets and not progress.has_work(self.number):
                ends_at = None
            elif ends_at is None or num_loaded != num_seen:
                ends_at = loop.time() + limit_s
            num_seen = num_loaded
            if not timeout.expired():
                timeout.reschedule(ends_at)
                timer = loop.call_later(_WATCH_INTERVAL_S, look)

        look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _is_cut_off(self) -> bool:
        progress = self._opened.progress
        return progress.is_cut_off(self.number) and not progress.is_aborted

    def _leave(self) -> None:
        reason = f"the engine that received for node {self._engine.node_id} was lost"
        self._feed(EngineCutOff(self._engine.name, reason))

    async def _is_stopped_by_abort(self, step: SyncStep) -> bool:
        """Whether an engine could not get ready or load because the sync was aborted. A lost rank
        breaks its connections and frees exported memory before the supervisor notices. The engines
        that notice first have not failed."""
        if step not in (SyncStep.PREPARE, SyncStep.LOAD):
            return False
        is_alive = self._engine.lifecycle.state != EngineState.DEAD
        reads_rank = self._opened.links is not None and step == SyncStep.LOAD
        if is_alive and (reads_rank or self._opened.transport.reads_ranks):
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_RANK_NEWS_LIMIT_S, self._lease.left_s)):
                    await self._was_aborted.wait()
        return self._opened.progress.is_aborted

    def _check_incarnation(self) -> None:
        engine = self._engine
        if engine.incarnation != self.incarnation:
            raise WeightSyncError(
                f"incarnation {self.incarnation} of {engine.name} took part, but "
                f"incarnation {engine.incarnation} is running"
            )

    def _timeout_s(self) -> float:
        if self._state.phase >= Phase.COMMITTING:
            return _SETTLE_TIMEOUT_S
        return self._lease.left_s * _ENGINE_SHARE
