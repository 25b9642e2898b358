"""Drives one sync: carries out what `SyncTransaction` decides.

Every engine has a worker task of its own. Loads are sent ahead, so that an engine never waits for
the next one; any other request waits for them, so a revert never overtakes a load that is still
copying. Ranks wait on futures. All on the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, assert_never, cast

from umbra.runtime.errors import ProtocolError, UmbraError, WeightSyncError
from umbra.runtime.lifecycle import EngineLifecycle, EngineState, Tag
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_events import (
    Aborted,
    Action,
    Attest,
    Close,
    Commit,
    CommitVersion,
    Discard,
    EngineAttested,
    EngineCommitted,
    EngineFailed,
    EngineLoaded,
    EnginePrepared,
    EngineResumed,
    EngineReverted,
    Event,
    FailRanks,
    GrantBegin,
    GrantFill,
    LeaseExpired,
    Load,
    Open,
    Opened,
    Prepare,
    RankFilled,
    RankJoined,
    Report,
    Resume,
    Revert,
)
from umbra.runtime.weights.transaction import Phase, SyncTransaction

logger = logging.getLogger(__name__)

_SETTLE_TIMEOUT_S: Final = 10.0
# For each call after the decision (commit, resume, revert), whatever is left of the lease: too
# short kills engines that were only slow, too long holds back the next sync.


class SyncEngine(Protocol):
    """An engine as the supervisor sees it. Calls raise `UmbraError` where they fail.

    `begin_update` leaves the weights as they are; `touch` is told, before the first
    `load_bucket`, that they are about to be those of no version (lifecycle BeginUpdate).
    `abort_update` ends the update; the lifecycle loses the version only if it was touched.
    """

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def lifecycle(self) -> EngineLifecycle: ...

    async def pause(self, mode: str, timeout_s: float) -> None: ...
    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None: ...
    async def resume(self, timeout_s: float) -> None: ...
    async def begin_update(
        self, version: int, manifest: dict[str, Any], buckets: dict[str, Any], timeout_s: float
    ) -> None: ...
    def touch(self, version: int) -> None: ...
    async def load_bucket(self, idx: int, timeout_s: float) -> Mapping[str, Any]: ...
    async def finish_update(
        self, regions: list[list[int | None]], timeout_s: float
    ) -> Mapping[str, Any]: ...
    async def commit_update(self, version: int, timeout_s: float) -> None: ...
    async def abort_update(self, timeout_s: float) -> None: ...
    def kill(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedImage:
    """What the coordinator provides once the layout is known.

    Attributes:
        buckets: for engines: fd_socket, names, bucket_nbytes.
    """

    engines: Sequence[SyncEngine]
    buckets: dict[str, Any]
    num_buckets: int
    attest: bool


class SyncHost(Protocol):
    """What a run needs from its coordinator."""

    @property
    def pause_mode(self) -> str: ...
    @property
    def engine_timeout_s(self) -> float: ...
    def open_image(self, version: int, manifest: Manifest) -> OpenedImage: ...
    def commit_version(self, version: int, run: SyncRun) -> None: ...


@dataclass(slots=True)
class _Worker:
    """One engine's requests and what they cost. `incarnation` is the one that takes part."""

    engine: SyncEngine
    incarnation: int
    was_serving: bool
    requests: asyncio.Queue[Action] = field(default_factory=asyncio.Queue[Action])
    loads: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    num_loading: int = 0
    loading_since: float = 0.0
    load_s: float = 0.0

    @contextmanager
    def loading(self) -> Generator[None]:
        """Counts the time in which at least one load is under way."""
        if self.num_loading == 0:
            self.loading_since = time.monotonic()
        self.num_loading += 1
        try:
            yield
        finally:
            self.num_loading -= 1
            if self.num_loading == 0:
                self.load_s += time.monotonic() - self.loading_since


class SyncRun:
    """One sync from the first rank that joins to the last engine that is settled."""

    def __init__(self, sync_id: str, version: int, host: SyncHost, require_engine: bool) -> None:
        self.sync_id = sync_id
        self.transaction = SyncTransaction(version, require_engine)
        self.opened: OpenedImage | None = None
        self.started = asyncio.Event()
        self.over = asyncio.Event()
        self._host = host
        self._workers: dict[str, _Worker] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting: dict[tuple[str, int, int], asyncio.Future[None]] = {}
        self._granted: set[str] = set()
        self._failure: str | None = None
        self._lease_end = float("inf")
        self._lease_s = float("inf")
        self._lease_changed = asyncio.Event()
        self._entered_at: dict[Phase, float] = {}
        self._prepared_at = 0.0
        self._report: dict[str, Any] = {}

    @property
    def version(self) -> int:
        return self.transaction.version

    async def run(self) -> None:
        """Lives until the sync is over; cancelling it fails the ranks and leaves engines as is."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.started.set()
                await self._watch_lease()
                for worker in self._workers.values():
                    worker.requests.put_nowait(Close())
        finally:
            self._fail_ranks("the supervisor is shutting down")

    def shorten_lease(self, lease_s: float) -> None:
        """The sync ends by itself `lease_s` from now; the earliest end holds."""
        lease_end = time.monotonic() + lease_s
        if lease_end < self._lease_end:
            self._lease_end = lease_end
            self._lease_s = lease_s
            self._lease_changed.set()

    def feed(self, event: Event) -> None:
        """Takes an event and carries out what follows from it."""
        events = collections.deque([event])
        while events:
            phase = self.transaction.phase
            actions = self.transaction.observe(events.popleft())
            if self.transaction.phase != phase:
                self._entered_at.setdefault(self.transaction.phase, time.monotonic())
            for action in actions:
                follow_up = self._act(action)
                if follow_up is not None:
                    events.append(follow_up)

    # -- ranks ---------------------------------------------------------------------------

    async def join(self, event: RankJoined) -> None:
        """Until all ranks have joined and engines are chosen."""
        await self._wait(("begin", event.rank, 0), event)

    async def fill(self, event: RankFilled) -> None:
        """Until every engine has loaded the bucket."""
        await self._wait(("fill", event.rank, event.idx), event)

    async def end(self, rank: int) -> dict[str, Any]:
        """The report, once engines serve the version."""
        if "end" not in self._granted:
            await self._wait(("end", rank, 0), None)
        return self._report

    async def _wait(self, key: tuple[str, int, int], event: Event | None) -> None:
        """Feeds the rank's event and waits for the grant of `key`: (what, rank, bucket).

        A rank that stops waiting (its call was cancelled, it died) aborts the sync.
        Raises WeightSyncError when the sync fails.
        """
        what, rank, _ = key
        if self._failure is not None:
            raise WeightSyncError(self._failure)
        if key in self._waiting:
            raise ProtocolError(f"rank {rank} waits for {what} of {self.sync_id} already")
        future = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            if event is not None:
                self.feed(event)
            await future
        except asyncio.CancelledError:
            self.feed(Aborted(f"rank {rank} stopped waiting ({what})"))
            raise
        finally:
            del self._waiting[key]

    def _grant(self, key: tuple[str, int, int]) -> None:
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_result(None)

    def _grant_all(self, what: str) -> None:
        self._granted.add(what)
        for key in [key for key in self._waiting if key[0] == what]:
            self._grant(key)

    def _fail_ranks(self, reason: str) -> None:
        if self._failure is None and "end" not in self._granted:
            self._failure = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WeightSyncError(reason))

    # -- actions -------------------------------------------------------------------------

    def _act(self, action: Action) -> Event | None:
        match action:
            case Open():
                return self._open(action.manifest)
            case Prepare() | Load() | Attest() | Commit() | Resume() | Revert():
                self._workers[action.engine].requests.put_nowait(action)
            case GrantBegin():
                self._grant_all("begin")
            case GrantFill():
                self._grant(("fill", action.rank, action.idx))
            case CommitVersion():
                self._host.commit_version(self.version, self)
            case Discard():
                self._discard(action)
            case FailRanks():
                logger.warning("sync of version %d failed: %s", self.version, action.reason)
                self._fail_ranks(action.reason)
            case Report():
                self._make_report()
                self._grant_all("end")
            case Close():
                self._lease_end = float("-inf")
                self._lease_changed.set()
            case _:
                assert_never(action)
        return None

    def _open(self, manifest: Manifest) -> Event:
        assert self._tasks is not None
        try:
            self.opened = self._host.open_image(self.version, manifest)
        except UmbraError as error:
            return Aborted(str(error))
        for engine in self.opened.engines:
            was_serving = engine.lifecycle.state == EngineState.SERVING
            worker = self._workers[engine.name] = _Worker(engine, engine.incarnation, was_serving)
            self._tasks.create_task(self._work(worker), name=f"sync:{engine.name}")
        return Opened(
            engines=list(self._workers),
            num_buckets=self.opened.num_buckets,
            num_buffers=len(self.opened.buckets["names"]),
        )

    def _discard(self, action: Discard) -> None:
        worker = self._workers[action.engine]
        worker.requests.put_nowait(Close())
        for load in worker.loads:
            load.cancel()
        state = worker.engine.lifecycle.state
        if worker.engine.incarnation == worker.incarnation and state != EngineState.DEAD:
            worker.engine.kill(f"weight sync: {action.reason}")

    def _make_report(self) -> None:
        entered: dict[Phase, float] = {}
        entered_at = time.monotonic()
        for phase in reversed(Phase):  # a phase that was skipped took no time
            entered_at = entered[phase] = self._entered_at.get(phase, entered_at)
        prepared_at = max(self._prepared_at, entered[Phase.OPENING])
        self._report = {
            "version": self.version,
            "engines": {
                name: {
                    "nbytes": self.transaction.loaded_nbytes(name),
                    "load_s": self._workers[name].load_s,
                }
                for name in self.transaction.live_engines
            },
            "failed": dict(self.transaction.failed),
            "prepare_s": prepared_at - entered[Phase.OPENING],
            "transfer_s": entered[Phase.ATTESTING] - prepared_at,
            "attest_s": entered[Phase.COMMITTING] - entered[Phase.ATTESTING],
            "resume_s": entered[Phase.CLOSED] - entered[Phase.COMMITTING],
        }

    # -- engines -------------------------------------------------------------------------

    async def _work(self, worker: _Worker) -> None:
        """Carries out one engine's requests in order, until Close or a failure."""
        assert self._tasks is not None
        while True:
            request = await worker.requests.get()
            if isinstance(request, Load):
                load = self._tasks.create_task(self._carry_out(worker, request))
                worker.loads.add(load)
                load.add_done_callback(worker.loads.discard)
                continue
            if worker.loads:
                await asyncio.wait(worker.loads)
            if isinstance(request, Close):
                return
            await self._carry_out(worker, request)

    async def _carry_out(self, worker: _Worker, request: Action) -> None:
        """One request; feeds what came of it."""
        name = worker.engine.name
        timeout_s = self._timeout_s()
        try:
            self._check_incarnation(worker)
            async with asyncio.timeout(timeout_s):
                event = await self._request(worker, request, timeout_s)
        except TimeoutError:
            reason = f"no answer within {timeout_s:.3g} s"
        except UmbraError as error:
            reason = str(error)
        except Exception as error:  # an engine must not end the supervisor
            logger.exception("%s of %s broke", type(request).__name__, name)
            reason = repr(error)
        else:
            self.feed(event)
            return
        self.feed(EngineFailed(name, f"{type(request).__name__.lower()}: {reason}"))

    async def _request(self, worker: _Worker, request: Action, timeout_s: float) -> Event:
        engine = worker.engine
        match request:
            case Prepare():
                await self._prepare(engine, timeout_s)
                self._prepared_at = time.monotonic()
                return EnginePrepared(engine.name)
            case Load():
                if request.is_first:
                    engine.touch(self.version)
                with worker.loading():
                    loaded = await engine.load_bucket(request.idx, timeout_s)
                return EngineLoaded(engine.name, request.idx, _integer(loaded, "nbytes"))
            case Attest():
                regions: list[list[int | None]] = [list(r) for r in self.transaction.regions]
                found = await engine.finish_update(regions, timeout_s)
                return _read_attestation(engine.name, found)
            case Commit():
                await engine.commit_update(self.version, timeout_s)
                return EngineCommitted(engine.name)
            case Resume():
                await self._resume(engine, timeout_s)
                return EngineResumed(engine.name)
            case Revert():
                await engine.abort_update(timeout_s)
                if worker.was_serving and not request.is_touched:
                    await self._resume(engine, timeout_s)
                return EngineReverted(engine.name)
            case _:
                raise AssertionError(f"{request} is not for an engine")

    async def _prepare(self, engine: SyncEngine, timeout_s: float) -> None:
        assert self.opened is not None
        assert self.transaction.manifest is not None
        await engine.pause(self._host.pause_mode, timeout_s)
        await engine.wake(["weights"], timeout_s)
        await engine.begin_update(
            self.version, self.transaction.manifest.to_wire(), self.opened.buckets, timeout_s
        )

    @staticmethod
    async def _resume(engine: SyncEngine, timeout_s: float) -> None:
        await engine.wake(["kv_cache"], timeout_s)
        await engine.resume(timeout_s)

    @staticmethod
    def _check_incarnation(worker: _Worker) -> None:
        if worker.engine.incarnation != worker.incarnation:
            raise WeightSyncError(
                f"incarnation {worker.incarnation} of {worker.engine.name} took part, "
                f"now there is {worker.engine.incarnation}"
            )

    def _timeout_s(self) -> float:
        """How long an engine may take: never so long that its failure would take the rest along."""
        if self.transaction.phase >= Phase.COMMITTING:
            return _SETTLE_TIMEOUT_S
        left_s = max(0.0, self._lease_end - time.monotonic())
        return min(self._host.engine_timeout_s, left_s / 2)

    async def _watch_lease(self) -> None:
        """Until the sync is over; at the end of the lease it is aborted."""
        is_expired = False
        while self.transaction.phase != Phase.CLOSED:
            self._lease_changed.clear()
            left_s = self._lease_end - time.monotonic()
            try:
                async with asyncio.timeout(None if is_expired else max(0.0, left_s)):
                    await self._lease_changed.wait()
            except TimeoutError:
                is_expired = True
                self.feed(LeaseExpired(self._lease_s))


def _read_attestation(engine: str, found: object) -> EngineAttested:
    mismatches = _fields(found).get("mismatches")
    if not isinstance(mismatches, list):
        raise ProtocolError(f"engine {engine} attested without a list of mismatches")
    texts = cast("list[Any]", mismatches)
    return EngineAttested(
        engine=engine,
        count=_integer(found, "count"),
        nbytes=_integer(found, "nbytes"),
        mismatches=[str(text) for text in texts],
    )


def _integer(answer: object, key: str) -> int:
    value = _fields(answer).get(key)
    if not isinstance(value, int):
        raise ProtocolError(f"an engine answered {key}={value!r} where a number belongs")
    return value


def _fields(answer: object) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping):
        raise ProtocolError(f"an engine answered {type(answer).__name__}, expected a map")
    return cast("Mapping[str, Any]", answer)
