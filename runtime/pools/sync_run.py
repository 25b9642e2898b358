from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol, assert_never

from umbra.runtime.errors import ProtocolError, UmbraError, WeightSyncError
from umbra.runtime.pools.engine_sync import EngineSync, Lease, OpenedSync
from umbra.runtime.pools.sync_state import (
    Aborted,
    Action,
    Ask,
    Close,
    CommitVersion,
    Discard,
    Event,
    FailRanks,
    Grant,
    LeaseExpired,
    Open,
    Opened,
    Phase,
    RankEvent,
    SyncState,
)
from umbra.runtime.tracing.spans import past_span
from umbra.runtime.weights.sync_messages import SyncEnd, SyncReport

logger = logging.getLogger(__name__)


class SyncHost(Protocol):
    @property
    def pool(self) -> str: ...
    @property
    def pause_mode(self) -> str: ...
    def open_sync(
        self, version: int, action: Open, lease: Lease
    ) -> AbstractAsyncContextManager[OpenedSync]: ...
    def commit_version(self, version: int, run: SyncRun) -> None: ...
    def remaining(self, version: int) -> list[str]: ...
    def on_discarded(self, engine: str, incarnation: int) -> None: ...


class SyncRun:
    """Drives one sync, from the first rank that joins to the last engine that settles.

    It carries out the decisions of `SyncState`. Ranks wait on futures, and every engine has a
    task (`engine_sync`), all on the supervisor's loop. The transfer itself does not go through the
    supervisor; when the sync aborts, the transport's `TransferProgress` stops it.
    """

    def __init__(self, sync_id: str, version: int, host: SyncHost) -> None:
        self.sync_id = sync_id
        self.state = SyncState(version)
        self.opened: OpenedSync | None = None
        self.begun_at = time.monotonic()
        self.started = asyncio.Event()
        self.over = asyncio.Event()
        self._host = host
        self._engine_syncs: dict[str, EngineSync] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waiting: dict[tuple[type[RankEvent], int], asyncio.Future[None]] = {}
        self.failure: str | None = None  # why its ranks got an error
        self.lease = Lease()
        self._entered_at: dict[Phase, float] = {}
        self._report: SyncReport | None = None

    @property
    def version(self) -> int:
        return self.state.version

    async def run(self) -> None:
        """Runs until the sync is over. Cancelling it fails the ranks and leaves
        engines as they are."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.started.set()
                await self._watch_lease()
                if self._opening is not None:
                    self._opening.cancel()
                for engine_sync in self._engine_syncs.values():
                    engine_sync.ask(None)
        finally:
            self._fail_ranks("the supervisor is shutting down")

    def feed(self, event: Event) -> None:
        phase = self.state.phase
        actions = self.state.observe(event)
        if self.state.phase != phase:
            began_s = self._entered_at.get(phase, self.begun_at)
            track = f"weight sync of {self._host.pool}"
            past_span(phase.name.lower(), began_s, track, version=self.version)
            self._entered_at.setdefault(self.state.phase, time.monotonic())
        for action in actions:
            self._act(action)

    async def wait(self, message: RankEvent) -> None:
        """Feeds a rank's message and waits until it is granted. A rank that stops waiting (its
        call was cancelled, it died) aborts the sync. Raises WeightSyncError if the sync fails."""
        key = (type(message), message.rank)
        name = f"{key[0].__name__} of rank {message.rank}"
        if self.failure is not None:
            raise WeightSyncError(self.failure)
        if key in self._waiting:
            raise ProtocolError(f"{name} is already waiting in sync {self.sync_id}")
        future = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            self.feed(message)
            await future
        except asyncio.CancelledError:
            self.feed(Aborted(f"rank {message.rank} stopped waiting ({key[0].__name__})"))
            raise
        finally:
            del self._waiting[key]

    async def end(self, message: SyncEnd) -> SyncReport:
        """Returns the report once engines serve the version. The rank holds no memory for them."""
        if self._report is None:
            await self.wait(message)
        assert self._report is not None
        return self._report

    def _grant(self, message: type[RankEvent]) -> None:
        for (waits_for, _), future in self._waiting.items():
            if waits_for is message and not future.done():
                future.set_result(None)

    def _fail_ranks(self, reason: str) -> None:
        if self.failure is None and self._report is None:
            self.failure = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WeightSyncError(reason))
        if self.opened is not None:
            self.opened.progress.abort()

    def _act(self, action: Action) -> None:
        match action:
            case Open():
                assert self._tasks is not None
                self._opening = self._tasks.create_task(
                    self._open(action), name=f"open:{self.sync_id}"
                )
            case Ask():
                self._engine_syncs[action.engine].ask(action.step)
            case Grant():
                if action.message is SyncEnd:
                    self._make_report()
                self._grant(action.message)
            case CommitVersion():
                self._host.commit_version(self.version, self)
            case Discard():
                engine_sync = self._engine_syncs[action.engine]
                engine_sync.discard(action.reason)
                self._host.on_discarded(action.engine, engine_sync.incarnation)
            case FailRanks():
                logger.warning("sync of version %d aborted: %s", self.version, action.reason)
                self._fail_ranks(action.reason)
                for engine_sync in self._engine_syncs.values():
                    engine_sync.abort()
            case Close():
                self.lease.changed.set()
            case _:
                assert_never(action)

    async def _open(self, action: Open) -> None:
        try:
            async with self._host.open_sync(self.version, action, self.lease) as opened:
                self._start_engines(opened)
                await asyncio.get_running_loop().create_future()
        except UmbraError as error:
            self.feed(Aborted(str(error)))

    def _start_engines(self, opened: OpenedSync) -> None:
        assert self._tasks is not None
        if self.state.phase != Phase.OPENING:
            return  # aborted meanwhile
        self.opened = opened
        for number, engine in opened.engines.items():
            engine_sync = self._engine_syncs[engine.name] = EngineSync(
                engine,
                number,
                opened=opened,
                state=self.state,
                lease=self.lease,
                feed=self.feed,
                pause_mode=self._host.pause_mode,
            )
            self._tasks.create_task(engine_sync.run(), name=f"sync:{engine.name}")
        self.feed(Opened(engines=list(self._engine_syncs), connects=opened.links is not None))

    def _make_report(self) -> None:
        entered: dict[Phase, float] = {}
        entered_at = time.monotonic()
        for phase in reversed(Phase):  # a phase that was skipped took no time
            entered_at = entered[phase] = self._entered_at.get(phase, entered_at)
        prepared = [engine_sync.prepared_at for engine_sync in self._engine_syncs.values()]
        prepared_at = max([entered[Phase.OPENING], *prepared])
        manifest = self.state.manifest
        assert manifest is not None
        self._report = SyncReport(
            version=self.version,
            transport="" if self.opened is None else self.opened.transport.name,
            engines={
                name: {"nbytes": manifest.payload_nbytes, "load_s": self._engine_syncs[name].load_s}
                for name in self.state.live_engines
            },
            failed=dict(self.state.failed),
            remaining=self._host.remaining(self.version),
            network_nbytes=self.state.network_nbytes,
            prepare_s=prepared_at - entered[Phase.OPENING],
            transfer_s=entered[Phase.VERIFYING] - prepared_at,
            verify_s=entered[Phase.COMMITTING] - entered[Phase.VERIFYING],
            resume_s=entered[Phase.CLOSED] - entered[Phase.COMMITTING],
        )

    async def _watch_lease(self) -> None:
        """Aborts the sync at the end of the lease; returns when the sync is over."""
        lease, is_expired = self.lease, False
        while self.state.phase != Phase.CLOSED:
            lease.changed.clear()
            limit_s = None if is_expired or lease.left_s == float("inf") else lease.left_s
            try:
                async with asyncio.timeout(limit_s):
                    await lease.changed.wait()
            except TimeoutError:
                is_expired = True
                self.feed(LeaseExpired(lease.length_s, self._progress_text()))

    def _progress_text(self) -> str:
        if self.opened is None:
            return ""
        progress, total = self.opened.progress, self.opened.layout.num_buckets
        loaded = {
            name: progress.num_loaded(each.number) for name, each in self._engine_syncs.items()
        }
        return f"of {total} buckets, ranks filled {progress.num_filled()}, engines loaded {loaded}"
