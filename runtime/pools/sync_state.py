"""The state of a sync, which brings a version to the engines of a pool that take part, or aborts.

Pure: no clock, task or socket. `sync_run` feeds it events and carries out its actions. Events and
actions are below the class.

    GATHERING ──all ranks joined──> OPENING ──Opened──> TRANSFERRING ──all done────┐
                                                                                   v
    CLOSED <──all serve── COMMITTING <──all verified, ranks released── VERIFYING <────┘

    any state before COMMITTING ──Aborted, LeaseExpired──> ABORTING ──> CLOSED

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
from typing import assert_never, cast

from umbra.runtime.errors import ProtocolError, brief
from umbra.runtime.weights.manifest import Manifest, find_gap
from umbra.runtime.weights.sync_messages import Region, SyncBegin, SyncEnd, SyncFilled


class Phase(IntEnum):
    GATHERING = 0
    OPENING = 1
    TRANSFERRING = 2
    VERIFYING = 3
    COMMITTING = 4
    ABORTING = 5
    CLOSED = 6


class SyncStep(StrEnum):
    """A step of one engine.

    PREPARE: take the layout, then pause, unless the transport connects ranks with engines.
    LOAD: pause, if the engine still generates and once its node has everything; wake the weights,
        and load all buckets. The answer is {"nbytes": int}.
    VERIFY: compare the checksums of the parameters with the ranks'. The answer is a list of
        differences.
    COMMIT: serve the version.
    REVERT: undo the update. An engine that has not loaded continues serving.
    """

    PREPARE = "prepare"
    LOAD = "load"
    VERIFY = "verify"
    COMMIT = "commit"
    REVERT = "revert"


class SyncState:
    """One sync of one version. If no engine is left, it is committed for later engines."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.phase = Phase.GATHERING
        self.manifest: Manifest | None = None
        self.network_nbytes = 0
        self.failed: dict[str, str] = {}
        self._checksums: dict[tuple[int, int], int | None] = {}  # by region: offset and nbytes
        self._world_size = 0
        self._joined: dict[int, SyncBegin] = {}
        self._filled: set[int] = set()
        self._released: set[int] = set()
        self._is_granted = False
        self._engines: dict[str, SyncStep | None] = {}  # the step that each is taking
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
            case SyncBegin():
                return self._on_joined(event)
            case Opened():
                return self._on_opened(event)
            case SyncFilled():
                return self._on_filled(event)
            case SyncEnd():
                self._released.add(event.rank)
                return self._advance()
            case Aborted():
                return self._abort(event.reason)
            case LeaseExpired():
                laggards = self._laggards(event.progress)
                return self._abort(f"not done within {event.lease_s:.3g} s: {laggards}")
            case EngineDone():
                return self._on_done(event)
            case EngineFailed():
                return self._on_failed(event.engine, event.reason)
            case EngineCutOff():
                return self._on_cut_off(event)
            case _:
                assert_never(event)

    def _on_joined(self, event: SyncBegin) -> list[Action]:
        if self.phase != Phase.GATHERING:
            return self._abort(f"rank {event.rank} joined a sync that is already in progress")
        expected_size = self._world_size or event.world_size
        if event.version != self.version or event.world_size != expected_size:
            return self._abort(
                f"rank {event.rank} publishes version {event.version} as one of "
                f"{event.world_size} ranks, the others publish version {self.version} "
                f"as {expected_size}"
            )
        if event.rank in self._joined:
            return self._abort(f"rank {event.rank} joined twice")
        if event.manifest is not None:
            try:
                self.manifest = Manifest.from_wire(event.manifest)
            except ProtocolError as error:
                return self._abort(f"rank {event.rank}: {error}")
        self._world_size = expected_size
        self._joined[event.rank] = event
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
        self._engines = dict.fromkeys(event.engines)
        self._is_granted = not event.connects
        grant = [Grant(SyncBegin)] if self._is_granted else []
        return [*self._ask_all(SyncStep.PREPARE), *grant, *self._advance()]

    def _on_filled(self, event: SyncFilled) -> list[Action]:
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

    def _on_done(self, event: EngineDone) -> list[Action]:
        engine, step = event.engine, event.step
        if engine in self._leaving and step == SyncStep.REVERT:
            self._leaving.remove(engine)
        elif self._engines.get(engine) != step:
            return []  # it left, or the sync was aborted meanwhile
        elif wrong := self._find_fault(step, event.answer):
            return self._on_failed(engine, wrong)
        elif step == SyncStep.PREPARE:
            self._engines[engine] = SyncStep.LOAD
            return [Ask(engine, SyncStep.LOAD), *self._advance()]
        else:
            self._engines[engine] = None
        return self._advance()

    def _find_fault(self, step: SyncStep, answer: object) -> str:
        """Why an engine cannot serve the version after this step, or ""."""
        assert self.manifest is not None
        expected_nbytes = self.manifest.payload_nbytes
        match step, answer:
            case SyncStep.LOAD, {"nbytes": int(nbytes)} if nbytes == expected_nbytes:
                return ""
            case SyncStep.LOAD, _:
                return f"load: it answered {brief(answer)}, expected {expected_nbytes} bytes"
            case (SyncStep.VERIFY, []) | (SyncStep.PREPARE | SyncStep.COMMIT | SyncStep.REVERT, _):
                return ""
            case SyncStep.VERIFY, _:
                found = cast("list[str]", answer) if isinstance(answer, list) else [brief(answer)]
                return f"corrupted on arrival: {'; '.join(map(str, found))}"

    def _on_cut_off(self, event: EngineCutOff) -> list[Action]:
        if event.engine not in self._engines:
            return []
        del self._engines[event.engine]
        self.failed[event.engine] = event.reason
        self._leaving.add(event.engine)
        return [Ask(event.engine, SyncStep.REVERT), *self._advance()]

    def _on_failed(self, engine: str, reason: str) -> list[Action]:
        if engine not in self._engines and engine not in self._leaving:
            return []
        self._engines.pop(engine, None)
        self._leaving.discard(engine)
        self.failed[engine] = reason
        return [Discard(engine, reason), *self._advance()]

    def _advance(self) -> list[Action]:
        """Moves to the next phases as far as known progress allows."""
        are_done = not any(self._engines.values())
        match self.phase:
            case Phase.TRANSFERRING if not self._is_granted:
                self._is_granted = SyncStep.PREPARE not in self._engines.values()
                return [Grant(SyncBegin)] if self._is_granted else []
            case Phase.TRANSFERRING if are_done and self._filled == self._joined.keys():
                self.phase = Phase.VERIFYING
                has_checksums = any(sent is not None for sent in self._checksums.values())
                asks = self._ask_all(SyncStep.VERIFY) if has_checksums else []
                return [Grant(SyncFilled), *asks, *self._advance()]
            case Phase.VERIFYING if are_done and self._released >= self._joined.keys():
                self.phase = Phase.COMMITTING
                return [CommitVersion(), *self._ask_all(SyncStep.COMMIT), *self._advance()]
            case Phase.COMMITTING if are_done and not self._leaving:
                self.phase = Phase.CLOSED
                return [Grant(SyncEnd), Close()]
            case Phase.ABORTING if are_done and not self._leaving:
                self.phase = Phase.CLOSED
                return [Close()]
            case _:
                return []

    def _ask_all(self, step: SyncStep) -> list[Action]:
        self._engines = dict.fromkeys(self._engines, step)
        return [Ask(engine, step) for engine in self._engines]

    def _abort(self, reason: str) -> list[Action]:
        if self.phase >= Phase.COMMITTING:
            return []  # too late: the engines hold the version, and will report it
        self.phase = Phase.ABORTING
        return [FailRanks(reason), *self._ask_all(SyncStep.REVERT), *self._advance()]

    def _laggards(self, progress: str) -> str:
        if self.phase == Phase.GATHERING:
            missing = sorted(set(range(self._world_size)) - self._joined.keys())
            return f"ranks {missing} of {self._world_size} did not publish version {self.version}"
        engines = [f"{name}: {step or 'done'}" for name, step in self._engines.items()]
        slow = f"engines: {', '.join(engines) or 'none'}"
        if self.phase == Phase.TRANSFERRING:
            laggards = sorted(self._joined.keys() - self._filled)
            slow = f"not filled by ranks {laggards}; {slow}; {progress}"
        unreleased = sorted(self._joined.keys() - self._released)
        if self.phase == Phase.VERIFYING and unreleased:
            slow = f"held back by ranks {unreleased}; {slow}"
        return f"{self.phase.name.lower()}; {slow}"


# Events. A rank's messages are events, too: `SyncEnd` releases its engines' KV cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The answer to `Open`: these engines take part. With `connects`, ranks wait
    for all of them."""

    engines: Sequence[str]
    connects: bool = False


@dataclass(frozen=True, slots=True)
class EngineDone:
    """The engine has taken the step; for the answer see `SyncStep`."""

    engine: str
    step: SyncStep
    answer: object = None


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


RankEvent = SyncBegin | SyncFilled | SyncEnd
Event = RankEvent | Opened | EngineDone | EngineFailed | EngineCutOff | Aborted | LeaseExpired

# Actions.


@dataclass(frozen=True, slots=True)
class Open:
    """Choose transport and engines, make the control block; answer with `Opened` or `Aborted`."""

    manifest: Manifest
    ranks: Sequence[SyncBegin]


@dataclass(frozen=True, slots=True)
class Ask:
    """Take the step; answer with `EngineDone`, `EngineFailed` or `EngineCutOff`."""

    engine: str
    step: SyncStep


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer this message of every rank."""

    message: type[RankEvent]


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """The point of no return: the pool's version is the new one."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Kill and replace the engine; the ranks no longer wait for it."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRanks:
    """Every message of every rank, pending or later, raises `WeightSyncError(reason)`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    pass


Action = Open | Ask | Grant | CommitVersion | Discard | FailRanks | Close
