from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pkgutil import resolve_name
from typing import Final

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.engine_api.pool_settings import Transport
from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.pools.engine_sync import Lease, OpenedSync
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.pools.sync_run import SyncRun
from umbra.runtime.pools.sync_state import Aborted, Open, Phase
from umbra.runtime.weights.image.fd_server import FdServer
from umbra.runtime.weights.image.image_memory import ImageHolder, ImageMemory, PlanParts
from umbra.runtime.weights.manifest import ALIGNMENT, align
from umbra.runtime.weights.sync_messages import (
    SyncAbort,
    SyncAnswer,
    SyncBegin,
    SyncCall,
    SyncEnd,
    SyncFilled,
    SyncGrant,
    SyncProgressed,
)
from umbra.runtime.weights.transport import LayoutOrder, TransportChooser, TransportPlan

logger = logging.getLogger(__name__)

_ANSWER_SHARE: Final = 0.9
# The lease ends this share before a rank's own deadline, so that the rank gets the reason.
_ENDED_KEPT: Final = 8
# Ended syncs whose outcome late callers still get.
_ABLE_STATES: Final = frozenset(
    {EngineState.SERVING, EngineState.PAUSED, EngineState.PENDING_WEIGHTS, EngineState.ASLEEP}
)
# Engines in other states take part in no sync.


class SyncCoordinator:
    """Serves the syncs of one pool, one after the other. Torch-free. `run` lives until cancelled.

        rank 0 ── SyncBegin ──┐                                     ┌── prepare_update ──> engine a
        rank 1 ── SyncBegin ──┴─> SyncCoordinator ── one SyncRun ───┴── prepare_update ──> engine b

    The supervisor separates other operations on the pool (sleep, wake, pause) from syncs. The
    coordinator owns the memory of syncs within a node, which `run` frees at its end. `version` is
    the last committed one. `engines` returns all engines of the pool, in any state; `on_abort`
    gets the version and the reason when a sync has failed. A version that reaches no engine is
    committed with a warning, and engines catch up with it later.
    """

    def __init__(
        self,
        pool: str,
        engines: Callable[[], Iterable[PoolEngine]],
        fd_server: FdServer,
        images: ImageHolder,
        settings: SyncSettings,
        on_abort: Callable[[int, str], None] | None = None,
    ) -> None:
        self.version: int | None = None
        self.pool = pool
        self._engines = engines
        self._settings = settings
        self._memory = ImageMemory(pool, fd_server)
        self._on_abort = on_abort
        parts = PlanParts(pool, self._memory, images, settings.staged_updates)
        self._transports = TransportChooser(
            pool, self._settings.transport, lambda row: resolve_name(row.plan)(parts)
        )
        self._last_transport: Transport | None = None
        self._sync_ids = itertools.count(1)
        self._num_versions = 0  # committed
        self._verified: dict[str, int] = {}  # by engine: last incarnation with verified checksums
        self._discarded: dict[str, int] = {}  # by engine: last incarnation that was killed
        self._current: SyncRun | None = None
        self._ended: collections.OrderedDict[str, SyncRun] = collections.OrderedDict()
        self._to_start: asyncio.Queue[SyncRun] = asyncio.Queue()

    @property
    def pause_mode(self) -> str:
        return self._settings.on_update

    @property
    def current(self) -> SyncRun | None:
        return self._current

    @property
    def is_syncing(self) -> bool:
        return self._current is not None

    async def wait_settled(self) -> None:
        while self._current is not None:
            await self._current.over.wait()

    async def run(self) -> None:
        """Runs syncs until cancelled; then an open one fails at its ranks."""
        try:
            while True:
                run = await self._to_start.get()
                try:
                    await run.run()
                    if run.failure is not None and self._on_abort is not None:
                        self._on_abort(run.version, run.failure)
                finally:
                    self._ended[run.sync_id] = run
                    self._current = None
                    run.over.set()
                    while len(self._ended) > _ENDED_KEPT:
                        self._ended.popitem(last=False)
        finally:
            self._memory.close()

    async def answer(self, message: SyncCall) -> SyncAnswer:
        """Answers a rank once its message is granted; see `sync_messages`. Cancelling it aborts the
        sync.

        Raises:
            WeightSyncError: the sync fails: a rank is missing or disagrees, or no engine can take
                part.
            DeadlineExceeded: the message's time is used up.
        """
        match message:
            case SyncBegin():
                return await self._begin(message)
            case SyncProgressed():
                opened = self._find(message.sync_id).opened
                if opened is None or opened.links is None:
                    raise ProtocolError(f"{message.sync_id!r} has its progress in shared memory")
                return opened.links.observe(message)
            case SyncFilled():
                async with asyncio.timeout(message.left_s):
                    await self._find(message.sync_id).wait(message)
            case SyncEnd():
                async with asyncio.timeout(message.left_s):
                    return await self._find(message.sync_id).end(message)
            case SyncAbort():
                with suppress(WeightSyncError):  # it is long over
                    run = self._find(message.sync_id)
                    run.feed(Aborted(f"rank {message.rank} aborted: {message.reason}"))
        return None

    async def _begin(self, message: SyncBegin) -> SyncGrant:
        """Engines get ready while the ranks fill."""
        run = await self._joinable_run(message.version, message.left_s)
        run.lease.shorten(message.left_s * _ANSWER_SHARE)
        await run.wait(message)
        assert run.opened is not None
        return SyncGrant(
            sync_id=run.sync_id,
            transport=run.opened.transport.name,
            bucket_nbytes=run.opened.bucket_nbytes,
            num_buckets=run.opened.layout.num_buckets,
            has_checksums=run.opened.has_checksums,
            details=run.opened.layout.rank_details(message.rank),
        )

    def rank_lost(self, rank: int, node: str = "") -> None:
        """`node` is the name of the rank's node, if the job has several."""
        if self._current is not None:
            where = f" on {node}" if node else ""
            self._current.feed(Aborted(f"rank {rank} is lost: its process{where} ended"))

    @asynccontextmanager
    async def open_sync(
        self, version: int, action: Open, lease: Lease
    ) -> AsyncGenerator[OpenedSync]:
        """Opens a sync for the engines that can take part and lack `version`. Raises
        WeightSyncError if the configured transport is unavailable."""
        able, limit_s = self._able_engines(), lease.left_s / 2
        transport, plan, ranks = await self._transports.choose(action.ranks, able, limit_s)
        manifest, chosen = action.manifest, self._choose_engines(version, plan)
        most_nbytes = max(align(manifest.nbytes), ALIGNMENT)
        bucket_nbytes = min(align(self._settings.bucket_nbytes), most_nbytes)
        order = LayoutOrder(
            manifest=manifest,
            bucket_nbytes=bucket_nbytes,
            ranks=ranks,
            engines=chosen,
            has_checksums=self._needs_checksums(version, chosen),
            timeout_s=lease.left_s / 2,
            keeps_sent=self._settings.full_sync_every > 1,
            sends_deltas=self._num_earlier(version) % self._settings.full_sync_every > 0,
        )
        if transport is not self._last_transport:
            await self._memory.free()
        self._last_transport = transport
        async with plan.lay_out(order) as layout:
            yield OpenedSync(
                engines={number: chosen[number] for number in layout.engine_details},
                transport=transport,
                bucket_nbytes=bucket_nbytes,
                layout=layout,
                has_checksums=order.has_checksums,
            )

    def commit_version(self, version: int, run: SyncRun) -> None:
        """Records that engines hold `version`; from here on the sync cannot be undone."""
        assert run.opened is not None
        engines = run.state.live_engines
        if run.opened.has_checksums:
            self._verified |= {
                e.name: e.incarnation for e in run.opened.engines.values() if e.name in engines
            }
        is_first = version != self.version
        self._num_versions += is_first
        self.version = version
        if engines:
            logger.info("pool %s: version %d is on %s", self.pool, version, ", ".join(engines))
        elif is_first:
            logger.warning(
                "pool %s: version %d is on no engine yet: %s",
                self.pool,
                version,
                run.state.failed or "none can take it now",
            )

    def remaining(self, version: int) -> list[str]:
        """Engines that hold an older version, and serve it or may serve it again. An engine without
        a version (PENDING_WEIGHTS) generates nothing, and waits for a catch-up sync."""
        able = self._able_engines()
        return [engine.name for engine in able if engine.lifecycle.version not in (None, version)]

    def on_discarded(self, engine: str, incarnation: int) -> None:
        self._discarded[engine] = incarnation

    def _choose_engines(self, version: int, plan: TransportPlan) -> list[PoolEngine]:
        # Other engines may have become ready since the transport was chosen.
        chosen = [engine for engine in self._able_engines() if plan.can_reach(engine)]
        if version == self.version:
            chosen = [engine for engine in chosen if engine.lifecycle.version != version]
        return chosen

    def _needs_checksums(self, version: int, engines: Sequence[PoolEngine]) -> bool:
        num_earlier, full_every = self._num_earlier(version), self._settings.full_sync_every
        is_due = num_earlier % self._settings.verify_every == 0
        # Checksums of full syncs only, which both cadences may fall on, would verify no delta.
        is_last_delta = full_every > 1 and (num_earlier + 1) % full_every == 0
        if is_due or is_last_delta:
            return True
        return any(self._verified.get(e.name) != e.incarnation for e in engines)

    def _num_earlier(self, version: int) -> int:
        return self._num_versions - (version == self.version)

    def _able_engines(self) -> list[PoolEngine]:
        able = (engine for engine in self._engines() if engine.lifecycle.state in _ABLE_STATES)
        return [e for e in able if self._discarded.get(e.name) != e.incarnation]

    async def _joinable_run(self, version: int, timeout_s: float) -> SyncRun:
        """The run that ranks can join now; a new one once the previous one is over."""
        try:
            async with asyncio.timeout(timeout_s * _ANSWER_SHARE):
                while self._current is not None and self._current.state.phase >= Phase.COMMITTING:
                    await self._current.over.wait()
                run = self._current or self._new_run(version)
                await run.started.wait()
                return run
        except TimeoutError:
            raise WeightSyncError(
                f"pool {self.pool}: an earlier sync is not over yet after {timeout_s:.3g} s"
            ) from None

    def _new_run(self, version: int) -> SyncRun:
        sync_id = f"{self.pool}-{next(self._sync_ids)}"
        self._current = SyncRun(sync_id, version, self)
        self._to_start.put_nowait(self._current)
        return self._current

    def _find(self, sync_id: str) -> SyncRun:
        if self._current is not None and self._current.sync_id == sync_id:
            return self._current
        run = self._ended.get(sync_id)
        if run is None:
            raise WeightSyncError(f"pool {self.pool} has no sync {sync_id!r}")
        return run
