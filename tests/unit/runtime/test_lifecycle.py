"""The engine lifecycle against a table written independently of it, and a naive model.

The table names, per state of the design and per event, where the engine goes; what is not in it is
illegal. Weights and cache are awake together or apart, hence the states with a suffix.
"""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbra.runtime.engine_api.lifecycle import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    Died,
    EngineLifecycle,
    EngineStarted,
    EngineState,
    Event,
    Invalidate,
    Pause,
    Restart,
    Resume,
    Sleep,
    Tag,
    Wake,
    Woken,
    catch_up,
)
from umbra.runtime.errors import EngineError, IllegalTransition

WEIGHTS: frozenset[Tag] = frozenset({"weights"})
CACHE: frozenset[Tag] = frozenset({"kv_cache"})
BOTH: frozenset[Tag] = WEIGHTS | CACHE

TO_PENDING: list[Event] = [EngineStarted()]
TO_UPDATING: list[Event] = [*TO_PENDING, BeginUpdate(7)]
TO_PAUSED: list[Event] = [*TO_UPDATING, CommitUpdate(7)]
TO_ASLEEP_1: list[Event] = [*TO_PAUSED, Sleep(1)]
TO_ASLEEP_2: list[Event] = [*TO_PAUSED, Sleep(2)]
PATHS: dict[str, list[Event]] = {
    "STARTING": [],
    "PENDING_WEIGHTS": TO_PENDING,
    "PENDING_WEIGHTS_NO_CACHE": [*TO_ASLEEP_2, Wake(WEIGHTS), Woken()],
    "PENDING_WEIGHTS_NO_WEIGHTS": [*TO_ASLEEP_2, Wake(CACHE), Woken()],
    "UPDATING": TO_UPDATING,
    "PAUSED": TO_PAUSED,
    "PAUSED_NO_CACHE": [*TO_ASLEEP_1, Wake(WEIGHTS), Woken()],
    "PAUSED_NO_WEIGHTS": [*TO_ASLEEP_1, Wake(CACHE), Woken()],
    "SERVING": [*TO_PAUSED, Resume()],
    "ASLEEP_1": TO_ASLEEP_1,
    "ASLEEP_2": TO_ASLEEP_2,
    "WAKING_KEPT": [*TO_ASLEEP_1, Wake(BOTH)],
    "WAKING_LOST": [*TO_ASLEEP_2, Wake(BOTH)],
    "WAKING_WEIGHTS_LOST": [*TO_ASLEEP_2, Wake(WEIGHTS)],
    "DEAD": [*TO_PENDING, Died()],
}
"""How to get into each state. The version is 7 where there is one."""

EVENTS: dict[str, Event] = {
    "started": EngineStarted(),
    "started 7": EngineStarted(7),
    "begin 8": BeginUpdate(8),
    "commit 7": CommitUpdate(7),
    "commit 8": CommitUpdate(8),
    "abort": AbortUpdate(),
    "pause": Pause(),
    "resume": Resume(),
    "sleep 1": Sleep(1),
    "sleep 2": Sleep(2),
    "wake both": Wake(BOTH),
    "wake weights": Wake(WEIGHTS),
    "wake cache": Wake(CACHE),
    "wake nothing": Wake(frozenset()),
    "woken": Woken(),
    "invalidate": Invalidate(),
    "died": Died(),
    "restart": Restart(),
}

Where = Literal[
    "STARTING",
    "PENDING_WEIGHTS",
    "UPDATING",
    "PAUSED",
    "SERVING",
    "ASLEEP",
    "WAKING",
    "DEAD",
]

SLEEP_KEEPING: dict[str, tuple[Where, int | None]] = {
    "sleep 1": ("ASLEEP", 7),
    "sleep 2": ("ASLEEP", None),
}
SLEEP_UNKNOWN: dict[str, tuple[Where, int | None]] = {
    "sleep 1": ("ASLEEP", None),
    "sleep 2": ("ASLEEP", None),
}
ALLOWED: dict[str, dict[str, tuple[Where, int | None]]] = {
    "STARTING": {"started": ("PENDING_WEIGHTS", None), "started 7": ("SERVING", 7)},
    "PENDING_WEIGHTS": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        **SLEEP_UNKNOWN,
    },
    "PENDING_WEIGHTS_NO_CACHE": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake cache": ("WAKING", None),
        **SLEEP_UNKNOWN,
    },
    "PENDING_WEIGHTS_NO_WEIGHTS": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake weights": ("WAKING", None),
        **SLEEP_UNKNOWN,
    },
    "UPDATING": {"commit 7": ("PAUSED", 7), "abort": ("PENDING_WEIGHTS", None)},
    "PAUSED": {
        "begin 8": ("UPDATING", None),
        "resume": ("SERVING", 7),
        "invalidate": ("PENDING_WEIGHTS", None),
        **SLEEP_KEEPING,
    },
    "PAUSED_NO_CACHE": {
        "begin 8": ("UPDATING", None),
        "resume": ("SERVING", 7),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake cache": ("WAKING", 7),
        **SLEEP_KEEPING,
    },
    "PAUSED_NO_WEIGHTS": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake weights": ("WAKING", 7),
        **SLEEP_KEEPING,
    },
    "SERVING": {"pause": ("PAUSED", 7)},
    "ASLEEP_1": {
        "begin 8": ("UPDATING", None),
        "wake both": ("WAKING", 7),
        "wake weights": ("WAKING", 7),
        "wake cache": ("WAKING", 7),
        "invalidate": ("ASLEEP", None),
    },
    "ASLEEP_2": {
        "begin 8": ("UPDATING", None),
        "wake both": ("WAKING", None),
        "wake weights": ("WAKING", None),
        "wake cache": ("WAKING", None),
        "invalidate": ("ASLEEP", None),
    },
    "WAKING_KEPT": {"woken": ("PAUSED", 7), "invalidate": ("WAKING", None)},
    "WAKING_LOST": {"woken": ("PENDING_WEIGHTS", None), "invalidate": ("WAKING", None)},
    "WAKING_WEIGHTS_LOST": {"woken": ("PENDING_WEIGHTS", None), "invalidate": ("WAKING", None)},
    "DEAD": {"restart": ("STARTING", None)},
}
for _name, _row in ALLOWED.items():
    if _name != "DEAD":
        _row["died"] = ("DEAD", None)


def after(events: list[Event]) -> EngineLifecycle:
    lifecycle = EngineLifecycle()
    for event in events:
        lifecycle = lifecycle.apply(event)
    return lifecycle


@pytest.mark.parametrize("event_name", EVENTS)
@pytest.mark.parametrize("state_name", PATHS)
def test_transitions_are_exactly_those_of_the_table(state_name: str, event_name: str) -> None:
    lifecycle, event = after(PATHS[state_name]), EVENTS[event_name]

    if event_name in ALLOWED[state_name]:
        state, version = ALLOWED[state_name][event_name]
        moved = lifecycle.apply(event)
        assert (moved.state, moved.version) == (state, version)
    else:
        with pytest.raises(IllegalTransition):
            lifecycle.apply(event)


def test_the_table_covers_every_state() -> None:
    assert {after(path).state for path in PATHS.values()} == set(EngineState)
    assert ALLOWED.keys() == PATHS.keys()


def test_a_hybrid_step_sleeps_syncs_and_serves_the_new_version() -> None:
    lifecycle = after(PATHS["SERVING"])
    seen = [str(lifecycle)]
    events: list[Event] = [
        Pause(),
        Sleep(2),
        BeginUpdate(8),
        CommitUpdate(8),
        Resume(),
    ]

    for event in events:
        lifecycle = lifecycle.apply(event)
        seen.append(str(lifecycle))

    assert seen == [
        "SERVING(7)",
        "PAUSED(7)",
        "ASLEEP(2)",
        "UPDATING(8)",
        "PAUSED(8)",
        "SERVING(8)",
    ]


def test_an_engine_with_weights_of_its_own_serves_them_in_every_incarnation() -> None:
    sleeps_and_wakes = [Pause(), Sleep(1), Wake(BOTH), Woken(), Resume()]

    first = after([EngineStarted(0), *sleeps_and_wakes])
    second = after([EngineStarted(0), Died(), Restart(), EngineStarted(0), *sleeps_and_wakes])

    assert str(first) == str(second) == "SERVING(0)"
    assert catch_up({"judge": after([EngineStarted(0)])}, 7, ranks_waiting=True) == []


def test_light_sleep_keeps_the_version_over_two_wakes() -> None:
    lifecycle = after([*PATHS["ASLEEP_1"], Wake(CACHE), Woken(), Wake(WEIGHTS), Woken(), Resume()])

    assert str(lifecycle) == "SERVING(7)"


def test_an_engine_that_slept_before_its_first_weights_wakes_without_a_version() -> None:
    for sleep in (Sleep(1), Sleep(2)):
        lifecycle = after([EngineStarted(), sleep, Wake(BOTH), Woken()])

        assert lifecycle == after([EngineStarted()])


def test_weights_disowned_during_a_wake_are_not_served() -> None:
    lifecycle = after([*PATHS["WAKING_KEPT"], Invalidate(), Woken()])

    assert lifecycle.state == EngineState.PENDING_WEIGHTS


def test_an_illegal_request_names_state_and_event() -> None:
    with pytest.raises(EngineError, match=r"Resume is not allowed in state ASLEEP\(2\)"):
        after(PATHS["ASLEEP_2"]).apply(Resume())
    with pytest.raises(IllegalTransition, match="not allowed while the weights sleep"):
        after(PATHS["PAUSED_NO_WEIGHTS"]).apply(Resume())
    with pytest.raises(IllegalTransition, match="commit version 8: the update is to 7"):
        after(PATHS["UPDATING"]).apply(CommitUpdate(8))
    with pytest.raises(IllegalTransition, match="cannot wake weights: asleep are kv_cache"):
        after(PATHS["PAUSED_NO_CACHE"]).apply(Wake(WEIGHTS))


def test_catch_up_picks_exactly_the_engines_without_weights() -> None:
    lifecycles = {name: after(path) for name, path in PATHS.items()}

    assert catch_up(lifecycles, current_version=7, ranks_waiting=True) == [
        "PENDING_WEIGHTS",
        "PENDING_WEIGHTS_NO_CACHE",
        "PENDING_WEIGHTS_NO_WEIGHTS",
    ]


def test_catch_up_waits_for_the_ranks_and_a_first_version() -> None:
    lifecycles = {"a": after(PATHS["PENDING_WEIGHTS"])}

    assert catch_up(lifecycles, current_version=7, ranks_waiting=False) == []
    assert catch_up(lifecycles, current_version=None, ranks_waiting=True) == []
    assert catch_up(lifecycles, current_version=0, ranks_waiting=True) == ["a"]


class NaiveEngine:
    """The physical state of an engine: bytes of some version or junk, and memory for parts."""

    def __init__(self) -> None:
        self.content: int | None = None  # The version in its weights; None: junk.
        self.device: set[Tag] = {"weights", "kv_cache"}


class LifecycleMachine(RuleBasedStateMachine):
    """Any events in any order: what the lifecycle claims, the naive engine really has."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = EngineLifecycle()
        self.engine = NaiveEngine()
        self.next_version = 0

    def attempt(self, event: Event) -> bool:
        """Apply if legal; an illegal event must leave no trace (values are immutable)."""
        try:
            self.lifecycle = self.lifecycle.apply(event)
        except IllegalTransition:
            return False
        return True

    @rule()
    def start(self) -> None:
        self.attempt(EngineStarted())

    @rule()
    def start_with_weights(self) -> None:
        if self.attempt(EngineStarted(0)):
            assert self.lifecycle.state == EngineState.SERVING
            self.engine.content = 0

    @rule()
    def die(self) -> None:
        was_dead = self.lifecycle.state == EngineState.DEAD
        assert self.attempt(Died()) is not was_dead
        self.engine = NaiveEngine()

    @rule()
    def restart(self) -> None:
        was_dead = self.lifecycle.state == EngineState.DEAD
        assert self.attempt(Restart()) is was_dead

    @rule()
    def begin(self) -> None:
        self.next_version += 1
        if self.attempt(BeginUpdate(self.next_version)):
            self.engine.device.add("weights")
            self.engine.content = None

    @rule(shift=st.integers(-1, 1))
    def commit(self, shift: int) -> None:
        version = (self.lifecycle.updating_to or 0) + shift
        if self.attempt(CommitUpdate(version)):
            assert shift == 0
            self.engine.content = version

    @rule()
    def abort(self) -> None:
        if self.attempt(AbortUpdate()):
            assert self.lifecycle.state == EngineState.PENDING_WEIGHTS

    @rule()
    def pause(self) -> None:
        self.attempt(Pause())

    @rule()
    def resume(self) -> None:
        if self.attempt(Resume()):
            assert "weights" in self.engine.device
            self.engine.device.add("kv_cache")

    @rule(level=st.sampled_from([1, 2]))
    def sleep(self, level: Literal[1, 2]) -> None:
        if self.attempt(Sleep(level)):
            self.engine.device = set()
            if level == 2:
                self.engine.content = None

    @rule(tags=st.sampled_from([WEIGHTS, CACHE, BOTH, frozenset[Tag]()]))
    def wake(self, tags: frozenset[Tag]) -> None:
        if self.attempt(Wake(tags)):
            assert tags
            assert not tags & self.engine.device

    @rule()
    def woken(self) -> None:
        waking = self.lifecycle.waking
        if self.attempt(Woken()):
            self.engine.device |= waking

    @rule()
    def invalidate(self) -> None:
        if self.attempt(Invalidate()):
            self.engine.content = None

    @precondition(lambda self: self.lifecycle.state == EngineState.SERVING)
    @rule()
    def serve(self) -> None:
        assert self.engine.content is not None
        assert self.engine.device == BOTH

    @invariant()
    def claims_are_true(self) -> None:
        lifecycle = self.lifecycle
        assert lifecycle.version == self.engine.content
        if lifecycle.state != EngineState.DEAD:
            assert lifecycle.awake == self.engine.device

    @invariant()
    def fields_belong_to_their_states(self) -> None:
        lifecycle, state = self.lifecycle, self.lifecycle.state
        assert (lifecycle.updating_to is not None) == (state == EngineState.UPDATING)
        assert (lifecycle.sleep_level is not None) == (state == EngineState.ASLEEP)
        assert bool(lifecycle.waking) == (state == EngineState.WAKING)
        if state in (EngineState.PAUSED, EngineState.SERVING):
            assert lifecycle.version is not None
        if state not in (
            EngineState.PAUSED,
            EngineState.SERVING,
            EngineState.ASLEEP,
            EngineState.WAKING,
        ):
            assert lifecycle.version is None

    @invariant()
    def catch_up_is_for_the_pending_only(self) -> None:
        picked = catch_up({"e": self.lifecycle}, self.next_version, ranks_waiting=True)
        assert (picked == ["e"]) == (self.lifecycle.state == EngineState.PENDING_WEIGHTS)


TestLifecycleMachine = LifecycleMachine.TestCase
