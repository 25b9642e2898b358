"""The lifecycle of an engine: a pure state machine, kept by the supervisor.

The supervisor moves it *before* it asks an engine for anything, so an illegal request is refused
before an engine sees it.

    DEAD <──died── any                      the supervisor notices that the process has ended
     │
     └──restart──> STARTING
                      │ started; with weights of its own, started(v) leads to SERVING(v)
                      v
        ┌────> PENDING_WEIGHTS ───────sleep───────────> ASLEEP(level)
        │        │          ^                             ^    │
        │  begin_update  abort_update                     │    │ wake
        │        v          │                             │    v
    invalidate  UPDATING(w) ┘                             │   WAKING(tags)
        │        │          ^                             │    │ woken
        │  commit_update  begin_update                    │    ├──> PAUSED(v), weights were kept
        │        v          │                             │    └──> PENDING_WEIGHTS, they were lost
        └───── PAUSED(v) ───┴─────────────────sleep───────┘
                 │    ^
              resume pause
                 v    │
               SERVING(v)

- The version is the one that the engine holds for certain. It is lost when weights are freed (level
  2), touched (UPDATING) or invalidated, and when the engine dies. SERVING has one.
- Weights and KV cache wake together or one after the other, so PAUSED and PENDING_WEIGHTS record
  which parts are `awake`. There `wake` is legal for the other parts.
- An update wakes the weights if they sleep, and `resume` the KV cache. So `begin_update` is
  legal in ASLEEP too, which is not drawn. In hybrid mode: sleep, begin_update, commit_update,
  resume.
- A sleep of one part leads to PAUSED, or to PENDING_WEIGHTS if the version is lost.
- An engine restarted while the trainer trains must free its memory too, so PENDING_WEIGHTS may
  sleep; it then wakes to PENDING_WEIGHTS, whatever the level.
- An engine that loads its weights itself (a judge) starts SERVING in every incarnation. No update
  and no level 2 ever takes its version from it; the pool ensures that.
- invalidate: the trainer that made the weights was restarted. A SERVING engine is paused first; in
  ASLEEP and WAKING only the version goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

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

    def started(self, version: int | None = None) -> EngineLifecycle:
        """The engine answers; its parameters are allocated. It serves weights of `version` if it
        has loaded them by itself."""
        self._require("started", EngineState.STARTING)
        state = EngineState.PENDING_WEIGHTS if version is None else EngineState.SERVING
        return replace(self, state=state, version=version)

    def begin_update(self, version: int) -> EngineLifecycle:
        """Takes memory for the weights if they sleep; `version` overwrites them."""
        self._require(
            "begin_update", EngineState.PENDING_WEIGHTS, EngineState.PAUSED, EngineState.ASLEEP
        )
        return EngineLifecycle(
            state=EngineState.UPDATING,
            updating_to=version,
            awake=self.awake | frozenset[Tag]({"weights"}),
        )

    def commit_update(self, version: int) -> EngineLifecycle:
        """All weights are of `version`, with the right checksums if the sync had any."""
        self._require("commit_update", EngineState.UPDATING)
        if version != self.updating_to:
            raise IllegalTransition(
                f"cannot commit version {version}: the update is to {self.updating_to}"
            )
        return replace(self, state=EngineState.PAUSED, version=version, updating_to=None)

    def abort_update(self) -> EngineLifecycle:
        """The update ended half way: the weights are unknown."""
        self._require("abort_update", EngineState.UPDATING)
        return replace(self, state=EngineState.PENDING_WEIGHTS, updating_to=None)

    def pause(self) -> EngineLifecycle:
        self._require("pause", EngineState.SERVING)
        return replace(self, state=EngineState.PAUSED)

    def resume(self) -> EngineLifecycle:
        """Takes memory for the KV cache if it sleeps, and generates under the version held."""
        self._require("resume", EngineState.PAUSED)
        if "weights" not in self.awake:
            raise IllegalTransition("resume is not allowed while the weights sleep")
        return replace(self, state=EngineState.SERVING, awake=ALL_TAGS)

    def sleep(self, level: SleepLevel, tags: frozenset[Tag] = ALL_TAGS) -> EngineLifecycle:
        """Frees the parts in `tags`: level 1 keeps the weights on the host, level 2 loses them."""
        self._require("sleep", EngineState.PENDING_WEIGHTS, EngineState.PAUSED)
        awake = self.awake - tags
        version = self.version if level == 1 or "weights" not in tags else None
        state = EngineState.PENDING_WEIGHTS if version is None else EngineState.PAUSED
        return EngineLifecycle(
            state=state if awake else EngineState.ASLEEP,
            version=version,
            sleep_level=None if awake else level,
            awake=awake,
        )

    def wake(self, tags: frozenset[Tag]) -> EngineLifecycle:
        self._require("wake", EngineState.ASLEEP, EngineState.PAUSED, EngineState.PENDING_WEIGHTS)
        if not tags or not tags <= ALL_TAGS - self.awake:
            raise IllegalTransition(
                f"cannot wake {_names(tags)}: asleep are {_names(ALL_TAGS - self.awake)}"
            )
        return replace(self, state=EngineState.WAKING, waking=tags, sleep_level=None)

    def woken(self) -> EngineLifecycle:
        self._require("woken", EngineState.WAKING)
        has_weights = self.version is not None
        return replace(
            self,
            state=EngineState.PAUSED if has_weights else EngineState.PENDING_WEIGHTS,
            awake=self.awake | self.waking,
            waking=frozenset(),
        )

    def invalidate(self) -> EngineLifecycle:
        """The version held is no longer valid."""
        self._require(
            "invalidate",
            EngineState.PENDING_WEIGHTS,
            EngineState.PAUSED,
            EngineState.ASLEEP,
            EngineState.WAKING,
        )
        if self.state in (EngineState.ASLEEP, EngineState.WAKING):
            return replace(self, version=None)
        return replace(self, state=EngineState.PENDING_WEIGHTS, version=None)

    def died(self) -> EngineLifecycle:
        self._require("died", *(state for state in EngineState if state != EngineState.DEAD))
        return EngineLifecycle(state=EngineState.DEAD)

    def restart(self) -> EngineLifecycle:
        self._require("restart", EngineState.DEAD)
        return EngineLifecycle()

    def _require(self, what: str, *allowed: EngineState) -> None:
        if self.state not in allowed:
            raise IllegalTransition(
                f"{what} is not allowed in state {self}, only in {', '.join(allowed)}"
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


def check_tags(tags: Collection[str]) -> None:
    if unknown := sorted(set(tags) - ALL_TAGS):
        raise ValueError(f"unknown tags {unknown}; allowed: {sorted(ALL_TAGS)}")


def _names(tags: frozenset[Tag]) -> str:
    return "+".join(sorted(tags)) or "nothing"


class EngineGate:
    """The engine's own copy of the lifecycle that the supervisor keeps; starts in PENDING_WEIGHTS.
    An engine driven by no supervisor, or by a faulty one, raises IllegalTransition for calls that
    would corrupt it: serving without weights, overwriting weights in use."""

    def __init__(self) -> None:
        self._lifecycle = EngineLifecycle().started()
        self._is_draining = False

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def version(self) -> int | None:
        return self._lifecycle.version

    @property
    def next_version(self) -> int:
        return -1 if self._lifecycle.updating_to is None else self._lifecycle.updating_to

    @property
    def awake(self) -> frozenset[Tag]:
        return self._lifecycle.awake

    @property
    def is_serving(self) -> bool:
        """Whether requests make progress, as they still do while draining."""
        return self.state == EngineState.SERVING

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def admit(self) -> None:
        if not self.is_serving or self._is_draining:
            state = "draining" if self._is_draining else str(self._lifecycle)
            raise IllegalTransition(
                f"the engine is {state} and takes no requests; wait until it serves"
            )

    def start_serving(self, version: int) -> None:
        """Weights were loaded from disk: PENDING_WEIGHTS → SERVING(version)."""
        loading = self._lifecycle.begin_update(version)
        self._lifecycle = loading.commit_update(version).resume()

    def drain(self) -> None:
        self._is_draining = self.is_serving

    def pause(self) -> None:
        self._is_draining = False
        if self.is_serving:
            self._lifecycle = self._lifecycle.pause()

    def check_resume(self) -> None:
        """Changes nothing: refuses a resumption before memory is taken for it."""
        if not self.is_serving:
            self._lifecycle.resume()

    def resume(self) -> None:
        self._is_draining = False
        if not self.is_serving:
            self._lifecycle = self._lifecycle.resume()

    def sleep(self, level: SleepLevel, tags: Sequence[Tag]) -> None:
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
        check_tags(tags)
        self._lifecycle = self._lifecycle.sleep(level, frozenset(tags))

    def wake(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Returns the tags to wake now; `woken` must follow."""
        check_tags(tags)
        sleeping = frozenset(tags) - self.awake
        if sleeping:
            self._lifecycle = self._lifecycle.wake(sleeping)
        return sleeping

    def woken(self) -> None:
        self._lifecycle = self._lifecycle.woken()

    def begin_update(self, version: int, *, is_idle: bool) -> None:
        """From here on the weights have no version. An idle engine need not be paused first."""
        if is_idle:
            self.pause()
        self._lifecycle = self._lifecycle.begin_update(version)

    def commit_update(self) -> int:
        version = self.next_version
        self._lifecycle = self._lifecycle.commit_update(version)
        return version

    def abort_update(self) -> None:
        if self.state == EngineState.UPDATING:
            self._lifecycle = self._lifecycle.abort_update()
