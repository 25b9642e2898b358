"""The sync transaction: brings a version to the engines of a pool that take part, or aborts.

Pure: no clock, task or socket. `sync_run` feeds it events and carries out its actions. Events and
actions are below the class.

    GATHERING ──all ranks joined──> OPENING ──Opened──> TRANSFERRING ──all done────┐
                                                                                   v
    CLOSED <──all serve── COMMITTING <──all verified, ranks released── VERIFYING <────┘

    any state before COMMITTING ──Aborted, LeaseExpired, no engine left──> ABORTING ──> CLOSED
    COMMITTING ──no engine left──> CLOSED

Ranks begin while engines get ready, unless the transport connects them with each other: then they
begin when all engines are ready, and an engine that serves is paused when its node has everything.
In TRANSFERRING an engine loads as soon as it is prepared and paused. Ranks and engines tell each
other directly which bucket to fill or load next (`sync_progress`); events only report who is done
with all of them. VERIFYING compares checksums, if the ranks sent any. It also waits until all ranks
are released, because an engine that commits allocates more memory, and a rank may first have work
to do once engines have read its own.

An engine that fails is discarded and the others continue. An engine that is cut off, because the
one that receives for its node failed, leaves the sync and is reverted, and gets the version with
the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import assert_never

from umbra.runtime.weights.manifest import Manifest, find_gap
from umbra.runtime.weights.sync_messages import Region
from umbra.runtime.weights.transport import RankOffer


class Phase(IntEnum):
    GATHERING = 0
    OPENING = 1
    TRANSFERRING = 2
    VERIFYING = 3
    COMMITTING = 4
    ABORTING = 5
    CLOSED = 6


class Stage(StrEnum):
    PREPARING = "preparing"
    LOADING = "loading"
    LOADED = "loaded"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    DONE = "done"


class SyncTransaction:
    """One sync of one version. `require_engine` fails it when no engine is left; else the version
    is committed for later engines."""

    def __init__(self, version: int, require_engine: bool = True) -> None:
        self.version = version
        self.phase = Phase.GATHERING
        self.manifest: Manifest | None = None
        self._checksums: dict[tuple[int, int], int | None] = {}  # by region: offset and nbytes
        self.network_nbytes = 0
        self.failed: dict[str, str] = {}
        self._require_engine = require_engine
        self._world_size = 0
        self._joined: dict[int, RankOffer] = {}
        self._filled: set[int] = set()
        self._released: set[int] = set()
        self._is_granted = False
        self._engines: dict[str, Stage] = {}
        self._leaving: set[str] = set()  # cut off, and not reverted yet

    @property
    def joined_ranks(self) -> list[int]:
        return sorted(self._joined)

    @property
    def regions(self) -> list[Region]:
        return [(offset, nbytes, sent) for (offset, nbytes), sent in self._checksums.items()]

    @property
    def live_engines(self) -> list[str]:
        return list(self._engines)

    def observe(self, event: Event) -> list[Action]:
        if self.phase == Phase.CLOSED:
            return []
        match event:
            case RankJoined():
                return self._on_joined(event)
            case Opened():
                return self._on_opened(event)
            case RankFilled():
                return self._on_filled(event)
            case RankReleased():
                self._released.add(event.rank)
                return self._advance()
            case Aborted():
                return self._abort(event.reason)
            case LeaseExpired():
                laggards = self._laggards(event.progress)
                return self._abort(f"not done within {event.lease_s:.3g} s: {laggards}")
            case EngineFailed():
                return self._on_failed(event)
            case EngineCutOff():
                return self._on_cut_off(event)
            case EngineReverted() if event.engine in self._leaving:
                self._leaving.remove(event.engine)
                return self._advance()
            case (
                EnginePrepared()
                | EngineLoaded()
                | EngineVerified()
                | EngineCommitted()
                | EngineReverted()
            ):
                return self._on_progress(event) if event.engine in self._engines else []
            case _:
                assert_never(event)

    def _on_joined(self, event: RankJoined) -> list[Action]:
        if self.phase != Phase.GATHERING:
            return self._abort(f"rank {event.rank} joined a sync that is already in progress")
        expected_size = self._world_size or event.world_size
        if event.version != self.version or event.world_size != expected_size:
            return self._abort(
                f"rank {event.rank} publishes version {event.version} as one of "
                f"{event.world_size} ranks, the others publish version {self.version} "
                f"as {expected_size}"
            )
        if event.rank in self._joined or not 0 <= event.rank < expected_size:
            return self._abort(
                f"rank {event.rank} of {expected_size} joined twice or is not one of them"
            )
        self._world_size = expected_size
        self._joined[event.rank] = event.offer
        self.manifest = event.manifest or self.manifest
        if len(self._joined) < expected_size:
            return []
        if self.manifest is None:
            return self._abort("no rank sent a manifest; rank 0 must")
        self.phase = Phase.OPENING
        return [Open(self.manifest, [self._joined[rank] for rank in range(expected_size)])]

    def _on_opened(self, event: Opened) -> list[Action]:
        if self.phase != Phase.OPENING:
            return []
        self.phase = Phase.TRANSFERRING
        self._engines = dict.fromkeys(event.engines, Stage.PREPARING)
        self._is_granted = not event.connects
        grant = [GrantBegin()] if self._is_granted else []
        return [*(Prepare(name) for name in event.engines), *grant, *self._advance()]

    def _on_filled(self, event: RankFilled) -> list[Action]:
        if self.phase != Phase.TRANSFERRING:
            return self._abort(f"rank {event.rank} filled its buckets in phase {self.phase.name}")
        if event.rank not in self._joined or event.rank in self._filled:
            return self._abort(f"rank {event.rank} filled its buckets twice or never joined")
        self._filled.add(event.rank)
        wrong = next((r for r in event.regions if self._differs(r)), None)
        if wrong is not None:
            return self._abort(
                f"rank {event.rank} and another one have different values in bytes [{wrong[0]}, "
                f"{wrong[0] + wrong[1]}) of the image: replicas of a shard must be equal"
            )
        self.network_nbytes += event.network_nbytes
        if event.is_released:
            self._released.add(event.rank)
        gap = self._find_gap()
        return self._abort(gap) if gap else self._advance()

    def _differs(self, region: Region) -> bool:
        offset, nbytes, checksum = region
        return self._checksums.setdefault((offset, nbytes), checksum) != checksum

    def _find_gap(self) -> str:
        """The first fault of all ranks' regions, or "". Called while engines load."""
        assert self.manifest is not None
        has_all = self._filled == self._joined.keys()
        return find_gap(self.manifest, self.regions) if has_all else ""

    def _on_progress(
        self,
        event: EnginePrepared | EngineLoaded | EngineVerified | EngineCommitted | EngineReverted,
    ) -> list[Action]:
        engine = event.engine
        match event:
            case EngineLoaded():
                assert self.manifest is not None
                expected_nbytes = self.manifest.payload_nbytes
                if event.nbytes != expected_nbytes and self.phase == Phase.TRANSFERRING:
                    wrong = f"load: it has {event.nbytes} bytes of {expected_nbytes}"
                    return self._on_failed(EngineFailed(engine, wrong))
                self._engines[engine] = Stage.LOADED
            case EngineVerified():
                if event.mismatches and self.phase == Phase.VERIFYING:
                    wrong = f"corrupted on arrival: {'; '.join(event.mismatches)}"
                    return self._on_failed(EngineFailed(engine, wrong))
                self._engines[engine] = Stage.VERIFIED
            case EnginePrepared():
                if self.phase == Phase.TRANSFERRING:
                    self._engines[engine] = Stage.LOADING
                    return [Load(engine), *self._advance()]
            case EngineCommitted() | EngineReverted():
                self._engines[engine] = Stage.DONE
            case _:
                assert_never(event)
        return self._advance()

    def _on_cut_off(self, event: EngineCutOff) -> list[Action]:
        if self._engines.pop(event.engine, None) is None:
            return []
        self.failed[event.engine] = event.reason
        self._leaving.add(event.engine)
        return [Revert(event.engine), *self._advance()]

    def _on_failed(self, event: EngineFailed) -> list[Action]:
        is_leaving = event.engine in self._leaving
        self._leaving.discard(event.engine)
        if self._engines.pop(event.engine, None) is None and not is_leaving:
            return []
        self.failed[event.engine] = event.reason
        return [Discard(event.engine, event.reason), *self._advance()]

    def _advance(self) -> list[Action]:
        """Moves to the next phases as far as known progress allows."""
        if self._require_engine and not self._engines and self.phase < Phase.ABORTING:
            return self._abort_without_engines()
        if self.phase == Phase.TRANSFERRING and not self._is_granted and self._all_prepared():
            self._is_granted = True
            return [GrantBegin()]
        if self.phase == Phase.TRANSFERRING and self._is_transferred():
            return self._finish_transfer()
        if self.phase == Phase.VERIFYING and self._is_verified():
            self.phase = Phase.COMMITTING
            commits: list[Action] = [Commit(name) for name in self._engines]
            return [CommitVersion(), *commits, *([] if commits else self._advance())]
        if self._leaving:
            return []
        if self.phase == Phase.COMMITTING and self._all_at(Stage.DONE):
            self.phase = Phase.CLOSED
            return [Report(), Close()]
        if self.phase == Phase.ABORTING and self._all_at(Stage.DONE):
            self.phase = Phase.CLOSED
            return [Close()]
        return []

    def _all_prepared(self) -> bool:
        return all(stage != Stage.PREPARING for stage in self._engines.values())

    def _is_transferred(self) -> bool:
        return self._filled == self._joined.keys() and self._all_at(Stage.LOADED)

    def _is_verified(self) -> bool:
        return self._released >= self._joined.keys() and self._all_at(Stage.VERIFIED)

    def _finish_transfer(self) -> list[Action]:
        self.phase = Phase.VERIFYING
        has_checksums = any(checksum is not None for checksum in self._checksums.values())
        stage = Stage.VERIFYING if has_checksums else Stage.VERIFIED
        self._engines = dict.fromkeys(self._engines, stage)
        verifications = [Verify(name) for name in self._engines] if has_checksums else []
        return [GrantFilled(), *verifications, *self._advance()]

    def _all_at(self, stage: Stage) -> bool:
        return all(reached == stage for reached in self._engines.values())

    def _abort_without_engines(self) -> list[Action]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
        reason = f"no engine is left for version {self.version}: {reasons or 'none can take part'}"
        if self.phase == Phase.COMMITTING:
            self.phase = Phase.CLOSED
            return [FailRanks(reason), Close()]
        return self._abort(reason)

    def _abort(self, reason: str) -> list[Action]:
        if self.phase >= Phase.COMMITTING:
            return []  # too late: the engines hold the version, and will report it
        self.phase = Phase.ABORTING
        reverts = [Revert(name) for name in self._engines]
        return [FailRanks(reason), *reverts, *self._advance()]

    def _laggards(self, progress: str) -> str:
        if self.phase == Phase.GATHERING:
            missing = sorted(set(range(self._world_size)) - self._joined.keys())
            return f"ranks {missing} of {self._world_size} did not publish version {self.version}"
        engines = [f"{name}: {stage}" for name, stage in self._engines.items()]
        slow = f"engines: {', '.join(engines) or 'none'}"
        if self.phase == Phase.TRANSFERRING:
            laggards = sorted(self._joined.keys() - self._filled)
            slow = f"not filled by ranks {laggards}; {slow}; {progress}"
        unreleased = sorted(self._joined.keys() - self._released)
        if self.phase == Phase.VERIFYING and unreleased:
            slow = f"held back by ranks {unreleased}; {slow}"
        return f"{self.phase.name.lower()}; {slow}"


# Events.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A rank called sync_begin. Rank 0 sends the layout; each makes its offer to transports."""

    rank: int
    world_size: int
    version: int
    manifest: Manifest | None
    offer: RankOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The answer to `Open`: these engines take part. With `connects`, ranks wait
    for all of them."""

    engines: Sequence[str]
    connects: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFilled:
    """A rank has written its part of all buckets. Unless `is_released`, `RankReleased` follows."""

    rank: int
    regions: Sequence[Region]
    network_nbytes: int
    is_released: bool


@dataclass(frozen=True, slots=True)
class RankReleased:
    """This rank holds nothing that prevents engines from allocating their KV cache."""

    rank: int


@dataclass(frozen=True, slots=True)
class EnginePrepared:
    """The engine has the layout."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The engine has read its tensors from all buckets."""

    engine: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineVerified:
    """The engine has compared the checksums of its parameters with the ranks'."""

    engine: str
    mismatches: Sequence[str]


@dataclass(frozen=True, slots=True)
class EngineCommitted:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineReverted:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine raised an error, was late, or died."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineCutOff:
    """The engine, which has not failed, cannot get the version: its node's receiver was lost."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """A rank aborted or died, or the supervisor cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    lease_s: float
    progress: str


Event = (
    RankJoined
    | Opened
    | RankFilled
    | RankReleased
    | EnginePrepared
    | EngineLoaded
    | EngineVerified
    | EngineCommitted
    | EngineReverted
    | EngineFailed
    | EngineCutOff
    | Aborted
    | LeaseExpired
)

# Actions.


@dataclass(frozen=True, slots=True)
class Open:
    """Choose transport and engines, make the control block; answer with `Opened` or `Aborted`."""

    manifest: Manifest
    offers: Sequence[RankOffer]  # of each rank


@dataclass(frozen=True, slots=True)
class Prepare:
    """Take the layout, then pause, unless the transport connects ranks with engines."""

    engine: str


@dataclass(frozen=True, slots=True)
class GrantBegin:
    """Every rank may fill buckets: sync_begin returns."""


@dataclass(frozen=True, slots=True)
class GrantFilled:
    """Every rank has filled and every engine has loaded everything: sync_filled returns."""


@dataclass(frozen=True, slots=True)
class Load:
    """Pause, if the engine still generates and once its node has everything; wake the weights, and
    load all buckets."""

    engine: str


@dataclass(frozen=True, slots=True)
class Verify:
    engine: str


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """The point of no return: the pool's version is the new one."""


@dataclass(frozen=True, slots=True)
class Commit:
    engine: str


@dataclass(frozen=True, slots=True)
class Revert:
    """Undo the update. Untouched engines continue serving."""

    engine: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Kill and replace the engine; the ranks no longer wait for it."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRanks:
    """Every call of every rank, pending or later, raises `WeightSyncError(reason)`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Action = (
    Open
    | Prepare
    | GrantBegin
    | GrantFilled
    | Load
    | Verify
    | CommitVersion
    | Commit
    | Revert
    | Discard
    | FailRanks
    | Report
    | Close
)
