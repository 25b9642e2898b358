"""The sync transaction: all engines of a pool get a version, or keep what they had.

Pure: no clock, task or socket. `umbra.runtime.weights.sync_run` feeds it and does what it says.

    GATHERING ──all ranks joined──> OPENING ──Opened──> TRANSFERRING ──all loaded──┐
                                                                                   v
             CLOSED <──all resumed── COMMITTING <──all attested── ATTESTING <──────┘

    any state before COMMITTING ──Aborted, LeaseExpired, no engine left──> ABORTING ──> CLOSED

An engine that fails is discarded and the rest go on. In TRANSFERRING, with two buffers:

    rank fills    0   1       2       3        a rank may fill i + 2 once all engines loaded i
    engine          prepare   0   1   2        an engine is told to load i once all ranks filled i
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import assert_never

from umbra.runtime.weights.coverage import find_gap
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


class Phase(IntEnum):
    GATHERING = 0
    OPENING = 1
    TRANSFERRING = 2
    ATTESTING = 3
    COMMITTING = 4
    ABORTING = 5
    CLOSED = 6


class Stage(StrEnum):
    """How far one engine has come."""

    PREPARING = "prepare"
    LOADING = "load all buckets"
    ATTESTING = "attest"
    ATTESTED = "commit"
    COMMITTED = "resume"
    DONE = "do anything more"


@dataclass(slots=True)
class _Progress:
    """Which buckets are done. They may finish in any order; `num` counts those without a gap."""

    num: int = 0
    ahead: set[int] = field(default_factory=set[int])

    def add(self, idx: int) -> bool:
        """False where it was done before."""
        if idx < self.num or idx in self.ahead:
            return False
        self.ahead.add(idx)
        while self.num in self.ahead:
            self.ahead.remove(self.num)
            self.num += 1
        return True


@dataclass(slots=True)
class _Engine:
    stage: Stage = Stage.PREPARING
    num_issued: int = 0
    loaded: _Progress = field(default_factory=_Progress)
    nbytes: int = 0


class SyncTransaction:
    """One sync of one version.

    Args:
        require_engine: fail when no engine is left; else the version is committed for engines
            to come.
    """

    def __init__(self, version: int, require_engine: bool = True) -> None:
        self.version = version
        self.phase = Phase.GATHERING
        self.manifest: Manifest | None = None
        self.regions: list[tuple[int, int, int | None]] = []
        self.failed: dict[str, str] = {}
        self._require_engine = require_engine
        self._world_size = 0
        self._filled: dict[int, _Progress] = {}
        self._waiting_fill: list[tuple[int, int]] = []  # (rank, idx)
        self._engines: dict[str, _Engine] = {}
        self._num_buckets = 0
        self._num_buffers = 0

    @property
    def live_engines(self) -> list[str]:
        return list(self._engines)

    def loaded_nbytes(self, engine: str) -> int:
        return self._engines[engine].nbytes

    def observe(self, event: Event) -> list[Action]:
        """Takes one event; what is to be done now, in order."""
        if self.phase == Phase.CLOSED:
            return []
        match event:
            case RankJoined():
                return self._on_joined(event)
            case Opened():
                return self._on_opened(event)
            case RankFilled():
                return self._on_filled(event)
            case Aborted():
                return self._abort(event.reason)
            case LeaseExpired():
                return self._abort(f"not done within {event.lease_s:.3g} s: {self._laggards()}")
            case EngineFailed():
                return self._on_failed(event)
            case (
                EnginePrepared()
                | EngineLoaded()
                | EngineAttested()
                | EngineCommitted()
                | EngineResumed()
                | EngineReverted()
            ):
                engine = self._engines.get(event.engine)
                return [] if engine is None else self._on_progress(engine, event)
            case _:
                assert_never(event)

    # -- ranks ---------------------------------------------------------------------------

    def _on_joined(self, event: RankJoined) -> list[Action]:
        if self.phase != Phase.GATHERING:
            return self._abort(f"rank {event.rank} came to a sync that is under way")
        expected_size = self._world_size or event.world_size
        if event.version != self.version or event.world_size != expected_size:
            return self._abort(
                f"rank {event.rank} publishes version {event.version} as one of "
                f"{event.world_size} ranks, the others version {self.version} "
                f"as {expected_size}"
            )
        if event.rank in self._filled or not 0 <= event.rank < expected_size:
            return self._abort(
                f"rank {event.rank} of {expected_size} came twice or is none of them"
            )
        self._world_size = expected_size
        self._filled[event.rank] = _Progress()
        self.manifest = event.manifest or self.manifest
        if len(self._filled) < expected_size:
            return []
        if self.manifest is None:
            return self._abort("no rank brought a manifest; rank 0 must")
        self.phase = Phase.OPENING
        return [Open(self.manifest)]

    def _on_opened(self, event: Opened) -> list[Action]:
        if self.phase != Phase.OPENING:
            return []
        self.phase = Phase.TRANSFERRING
        self._num_buckets = event.num_buckets
        self._num_buffers = event.num_buffers
        self._engines = {name: _Engine() for name in event.engines}
        return [*(Prepare(name) for name in event.engines), GrantBegin(), *self._advance()]

    def _on_filled(self, event: RankFilled) -> list[Action]:
        if self.phase != Phase.TRANSFERRING:
            return self._abort(f"rank {event.rank} filled a bucket in phase {self.phase.name}")
        limit = min(self._num_buckets, self._num_loaded() + self._num_buffers)
        progress = self._filled.get(event.rank)
        if progress is None or not event.idx < limit or not progress.add(event.idx):
            return self._abort(
                f"rank {event.rank} filled bucket {event.idx} out of turn: buckets below {limit} "
                f"may be filled, each once"
            )
        self._waiting_fill.append((event.rank, event.idx))
        self.regions.extend(event.regions)
        return self._advance()

    # -- engines -------------------------------------------------------------------------

    def _on_progress(
        self,
        engine: _Engine,
        event: EnginePrepared
        | EngineLoaded
        | EngineAttested
        | EngineCommitted
        | EngineResumed
        | EngineReverted,
    ) -> list[Action]:
        match event:
            case EngineLoaded():
                engine.loaded.add(event.idx)
                engine.nbytes += event.nbytes
            case EngineAttested():
                wrong = self._check_attestation(event)
                if wrong and self.phase == Phase.ATTESTING:
                    return self._on_failed(EngineFailed(event.engine, wrong))
                engine.stage = Stage.ATTESTED
            case EnginePrepared():
                engine.stage = Stage.LOADING
            case EngineCommitted():
                engine.stage = Stage.COMMITTED
                return [Resume(event.engine)]
            case EngineResumed() | EngineReverted():
                engine.stage = Stage.DONE
            case _:
                assert_never(event)
        return self._advance()

    def _on_failed(self, event: EngineFailed) -> list[Action]:
        if self._engines.pop(event.engine, None) is None:
            return []
        self.failed[event.engine] = event.reason
        return [Discard(event.engine, event.reason), *self._advance()]

    def _check_attestation(self, event: EngineAttested) -> str:
        """What is wrong with it, or ""."""
        expected_nbytes = sum(nbytes for _, nbytes, _ in self.regions)
        if event.mismatches:
            return f"corrupted on arrival: {'; '.join(event.mismatches)}"
        if (event.count, event.nbytes) != (len(self.regions), expected_nbytes):
            return (
                f"attests {event.count} regions of {event.nbytes} bytes, "
                f"sent were {len(self.regions)} of {expected_nbytes}"
            )
        return ""

    # -- progress ------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        """Goes on as far as what is known allows."""
        if self._require_engine and not self._engines and self.phase < Phase.ABORTING:
            return self._give_up()
        if self.phase == Phase.TRANSFERRING:
            return self._transfer()
        if self.phase == Phase.ATTESTING and self._all_at(Stage.ATTESTED):
            self.phase = Phase.COMMITTING
            commits: list[Action] = [Commit(name) for name in self._engines]
            return [CommitVersion(), *commits, *([] if commits else self._advance())]
        if self.phase == Phase.COMMITTING and self._all_at(Stage.DONE):
            self.phase = Phase.CLOSED
            return [Report(), Close()]
        if self.phase == Phase.ABORTING and self._all_at(Stage.DONE):
            self.phase = Phase.CLOSED
            return [Close()]
        return []

    def _transfer(self) -> list[Action]:
        num_filled = self._num_filled()
        num_loaded = self._num_loaded()
        actions: list[Action] = []
        for name, engine in self._engines.items():
            if engine.stage == Stage.LOADING:
                indices = range(engine.num_issued, num_filled)
                actions += [Load(name, idx, is_first=idx == 0) for idx in indices]
                engine.num_issued = num_filled
        granted = [(rank, idx) for rank, idx in self._waiting_fill if idx < num_loaded]
        self._waiting_fill = [waiting for waiting in self._waiting_fill if waiting not in granted]
        actions += [GrantFill(rank, idx) for rank, idx in granted]
        if num_filled == num_loaded == self._num_buckets and self._all_at(Stage.LOADING):
            actions += self._finish_transfer()
        return actions

    def _num_filled(self) -> int:
        """Buckets that every rank has filled."""
        return min((progress.num for progress in self._filled.values()), default=0)

    def _num_loaded(self) -> int:
        """Buckets that every engine has loaded; without engines, those that are filled."""
        engines = self._engines.values()
        return min((engine.loaded.num for engine in engines), default=self._num_filled())

    def _finish_transfer(self) -> list[Action]:
        assert self.manifest is not None
        gap = find_gap(self.manifest, self.regions)
        if gap:
            return self._abort(gap)
        self.phase = Phase.ATTESTING
        for engine in self._engines.values():
            engine.stage = Stage.ATTESTING
        attests: list[Action] = [Attest(name) for name in self._engines]
        return attests or self._advance()

    def _all_at(self, stage: Stage) -> bool:
        return all(engine.stage == stage for engine in self._engines.values())

    # -- the end -------------------------------------------------------------------------

    def _give_up(self) -> list[Action]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
        reason = f"no engine is left to get version {self.version}: {reasons or 'none can take it'}"
        if self.phase == Phase.COMMITTING:
            self.phase = Phase.CLOSED
            return [FailRanks(reason), Close()]
        return self._abort(reason)

    def _abort(self, reason: str) -> list[Action]:
        if self.phase >= Phase.COMMITTING:
            return []  # too late: the engines hold the version, and will say so
        self.phase = Phase.ABORTING
        reverts = [Revert(name, engine.num_issued > 0) for name, engine in self._engines.items()]
        return [FailRanks(reason), *reverts, *self._advance()]

    def _laggards(self) -> str:
        if self.phase == Phase.GATHERING:
            missing = sorted(set(range(self._world_size)) - self._filled.keys())
            return f"ranks {missing} of {self._world_size} did not publish version {self.version}"
        least = self._num_filled()
        slow_ranks = [rank for rank, filled in self._filled.items() if filled.num == least]
        slow_engines = [
            f"{name} (has yet to {engine.stage})" for name, engine in self._engines.items()
        ]
        return (
            f"{self.phase.name.lower()}; {least} of {self._num_buckets} buckets filled by all "
            f"ranks (slowest: {slow_ranks}); waiting engines: {', '.join(slow_engines) or 'none'}"
        )
