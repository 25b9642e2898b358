"""The lifecycle of an engine: a pure state machine, kept by the supervisor.

The supervisor applies an event *before* it asks an engine for anything, so an illegal request is
refused before an engine sees it.

    DEAD <──Died── any                      the supervisor notices that the process has ended
     │
     └──Restart──> STARTING
                      │ EngineStarted; with weights of its own, EngineStarted(v) leads to SERVING(v)
                      v
        ┌────> PENDING_WEIGHTS ───────Sleep───────────> ASLEEP(level)
        │        │          ^                             ^    │
        │   BeginUpdate  AbortUpdate                      │    │ Wake
        │        v          │                             │    v
    Invalidate  UPDATING(w) ┘                             │   WAKING(tags)
        │        │          ^                             │    │ Woken
        │   CommitUpdate  BeginUpdate                     │    ├──> PAUSED(v), weights were kept
        │        v          │                             │    └──> PENDING_WEIGHTS, they were lost
        └───── PAUSED(v) ───┴─────────────────Sleep───────┘
                 │    ^
              Resume Pause
                 v    │
               SERVING(v)

- The version is the one that the engine holds for certain. It is lost when weights are freed (level
  2), touched (UPDATING) or invalidated (Invalidate), and when the engine dies. SERVING has one.
- Weights and KV cache wake together or one after the other, so PAUSED and PENDING_WEIGHTS record
  which parts are `awake`. There Wake is legal for the other parts.
- An update wakes the weights if they sleep, and Resume the KV cache. So BeginUpdate is legal in
  ASLEEP too, which is not drawn. In hybrid mode: Sleep, BeginUpdate, CommitUpdate, Resume.
- An engine restarted while the trainer trains must free its memory too, so PENDING_WEIGHTS may
  Sleep; it then wakes to PENDING_WEIGHTS, whatever the level.
- An engine that loads its weights itself (a judge) starts SERVING in every incarnation. No update
  and no level 2 ever takes its version from it; the pool ensures that.
- Invalidate: the trainer that made the weights was restarted. A SERVING engine is paused first; in
  ASLEEP and WAKING only the version goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal, assert_never

from umbra.runtime.errors import IllegalTransition

Tag = Literal["weights", "kv_cache"]
SleepLevel = Literal[1, 2]

ALL_TAGS: Final[frozenset[Tag]] = frozenset({"weights", "kv_cache"})


class EngineState(StrEnum):
    STARTING = "STARTING"
    PENDING_WEIGHTS = "PENDING_WEIGHTS"
    UPDATING = "UPDATING"
    PAUSED = "PAUSED"
    SERVING = "SERVING"
    ASLEEP = "ASLEEP"
    WAKING = "WAKING"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The engine answers; its parameters are allocated."""

    version: int | None = None
    """Version of weights that it has loaded by itself, and serves."""


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Takes memory for the weights if they sleep; `version` overwrites them."""

    version: int


@dataclass(frozen=True, slots=True)
class CommitUpdate:
    """All weights are of `version`, with the right checksums if the sync had any."""

    version: int


@dataclass(frozen=True, slots=True)
class AbortUpdate:
    """The update ended half way: the weights are unknown."""


@dataclass(frozen=True, slots=True)
class Pause:
    pass


@dataclass(frozen=True, slots=True)
class Resume:
    """Takes memory for the KV cache if it sleeps, and generates under the version held."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Frees memory: level 1 keeps the weights on the host, level 2 loses them."""

    level: SleepLevel


@dataclass(frozen=True, slots=True)
class Wake:
    tags: frozenset[Tag] = ALL_TAGS


@dataclass(frozen=True, slots=True)
class Woken:
    pass


@dataclass(frozen=True, slots=True)
class Invalidate:
    """The version held is no longer valid."""


@dataclass(frozen=True, slots=True)
class Died:
    pass


@dataclass(frozen=True, slots=True)
class Restart:
    pass


Event = (
    EngineStarted
    | BeginUpdate
    | CommitUpdate
    | AbortUpdate
    | Pause
    | Resume
    | Sleep
    | Wake
    | Woken
    | Invalidate
    | Died
    | Restart
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLifecycle:
    state: EngineState = EngineState.STARTING
    version: int | None = None
    """The version that it holds for certain."""
    updating_to: int | None = None
    """In UPDATING only: the version being loaded."""
    sleep_level: SleepLevel | None = None
    """In ASLEEP only."""
    awake: frozenset[Tag] = ALL_TAGS
    """Parts that have memory; none in ASLEEP."""
    waking: frozenset[Tag] = frozenset()
    """In WAKING only: parts that are being allocated."""

    def apply(self, event: Event) -> EngineLifecycle:
        match event:
            case Died():
                self._require(event, *(state for state in EngineState if state != EngineState.DEAD))
                return EngineLifecycle(state=EngineState.DEAD)
            case Restart():
                self._require(event, EngineState.DEAD)
                return EngineLifecycle()
            case EngineStarted(version=version):
                self._require(event, EngineState.STARTING)
                if version is not None:
                    return replace(self, state=EngineState.SERVING, version=version)
                return replace(self, state=EngineState.PENDING_WEIGHTS)
            case Pause():
                self._require(event, EngineState.SERVING)
                return replace(self, state=EngineState.PAUSED)
            case Resume():
                self._require(event, EngineState.PAUSED)
                if "weights" not in self.awake:
                    raise IllegalTransition("Resume is not allowed while the weights sleep")
                return replace(self, state=EngineState.SERVING, awake=ALL_TAGS)
            case BeginUpdate() | CommitUpdate() | AbortUpdate():
                return self._update(event)
            case Sleep() | Wake() | Woken():
                return self._sleep(event)
            case Invalidate():
                return self._invalidate(event)
            case _:
                assert_never(event)

    def _update(self, event: BeginUpdate | CommitUpdate | AbortUpdate) -> EngineLifecycle:
        if isinstance(event, BeginUpdate):
            self._require(
                event, EngineState.PENDING_WEIGHTS, EngineState.PAUSED, EngineState.ASLEEP
            )
            return EngineLifecycle(
                state=EngineState.UPDATING,
                updating_to=event.version,
                awake=self.awake | frozenset[Tag]({"weights"}),
            )
        self._require(event, EngineState.UPDATING)
        if isinstance(event, AbortUpdate):
            return replace(self, state=EngineState.PENDING_WEIGHTS, updating_to=None)
        if event.version != self.updating_to:
            raise IllegalTransition(
                f"cannot commit version {event.version}: the update is to {self.updating_to}"
            )
        return replace(self, state=EngineState.PAUSED, version=event.version, updating_to=None)

    def _sleep(self, event: Sleep | Wake | Woken) -> EngineLifecycle:
        match event:
            case Sleep(level=level):
                self._require(event, EngineState.PENDING_WEIGHTS, EngineState.PAUSED)
                return EngineLifecycle(
                    state=EngineState.ASLEEP,
                    version=self.version if level == 1 else None,
                    sleep_level=level,
                    awake=frozenset(),
                )
            case Wake(tags=tags):
                self._require(
                    event, EngineState.ASLEEP, EngineState.PAUSED, EngineState.PENDING_WEIGHTS
                )
                if not tags or not tags <= ALL_TAGS - self.awake:
                    raise IllegalTransition(
                        f"cannot wake {_names(tags)}: asleep are {_names(ALL_TAGS - self.awake)}"
                    )
                return replace(self, state=EngineState.WAKING, waking=tags, sleep_level=None)
            case Woken():
                self._require(event, EngineState.WAKING)
                return replace(
                    self,
                    state=self._stopped_state(self.version),
                    awake=self.awake | self.waking,
                    waking=frozenset(),
                )

    def _invalidate(self, event: Invalidate) -> EngineLifecycle:
        self._require(
            event,
            EngineState.PENDING_WEIGHTS,
            EngineState.PAUSED,
            EngineState.ASLEEP,
            EngineState.WAKING,
        )
        if self.state in (EngineState.ASLEEP, EngineState.WAKING):
            return replace(self, version=None)
        return replace(self, state=EngineState.PENDING_WEIGHTS, version=None)

    @staticmethod
    def _stopped_state(version: int | None) -> EngineState:
        return EngineState.PENDING_WEIGHTS if version is None else EngineState.PAUSED

    def _require(self, event: Event, *allowed: EngineState) -> None:
        if self.state not in allowed:
            raise IllegalTransition(
                f"{type(event).__name__} is not allowed in state {self}, only in "
                f"{', '.join(allowed)}"
            )

    def __str__(self) -> str:
        """For example PAUSED(3), ASLEEP(2), UPDATING(4), WAKING(weights)."""
        match self.state:
            case EngineState.PAUSED | EngineState.SERVING:
                return f"{self.state}({self.version})"
            case EngineState.UPDATING:
                return f"{self.state}({self.updating_to})"
            case EngineState.ASLEEP:
                return f"{self.state}({self.sleep_level})"
            case EngineState.WAKING:
                return f"{self.state}({_names(self.waking)})"
            case _:
                return str(self.state)


def catch_up(
    lifecycles: Mapping[str, EngineLifecycle], current_version: int | None, ranks_waiting: bool
) -> list[str]:
    """Engines in PENDING_WEIGHTS, to be updated by a sync of their own while every rank waits for a
    batch: only then have all ranks the weights of that version. Before a first version exists there
    are none, because the first sync reaches every engine anyway."""
    if current_version is None or not ranks_waiting:
        return []
    return [
        name
        for name, lifecycle in lifecycles.items()
        if lifecycle.state == EngineState.PENDING_WEIGHTS
    ]


def _names(tags: frozenset[Tag]) -> str:
    return "+".join(sorted(tags)) or "nothing"
