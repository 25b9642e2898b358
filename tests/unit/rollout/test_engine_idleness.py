"""Engine-seconds by use, against a model that looks at every engine in every second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.rollout.dispatch.pool_load import EngineIdleness
from umbra.runtime.rollout.dispatch.router import EngineId

A, B = EngineId("a", 1), EngineId("b", 1)

_ENGINES = st.builds(EngineId, st.sampled_from("abc"), st.integers(1, 2))
_EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # seconds that pass before
        st.one_of(
            st.tuples(_ENGINES, st.sampled_from(EngineState)),
            st.tuples(_ENGINES, st.booleans()),
            st.just("take"),
        ),
    ),
    max_size=40,
)


class World:
    """The accumulator, and beside it every second of every engine."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idleness = EngineIdleness(lambda: self.now)
        self.lives: dict[str, tuple[EngineId, EngineState]] = {}
        self.holding: set[EngineId] = set()
        self.uses: list[str] = []

    def wait(self, seconds: int) -> None:
        self.now += seconds
        for engine, state in list(self.lives.values()) * seconds:
            is_able = state in ("SERVING", "PAUSED")
            idle = "no work" if state == "SERVING" else "unavailable"
            self.uses.append("busy" if is_able and engine in self.holding else idle)

    def report(self, engine: EngineId, state: EngineState) -> None:
        self.lives[engine.name] = (engine, state)
        self.idleness.report(engine, state)

    def hold(self, engine: EngineId, holds: bool) -> None:
        self.holding = self.holding | {engine} if holds else self.holding - {engine}
        self.idleness.hold(engine, holds)

    def check_shares(self) -> None:
        shares, uses, self.uses = self.idleness.take_shares(), self.uses, []
        if not uses:
            assert shares == {}
            return
        idle = 1 - uses.count("busy") / len(uses)
        assert shares["engine_idle_share"] == pytest.approx(idle)
        assert shares["engine_no_work_share"] == pytest.approx(uses.count("no work") / len(uses))
        assert 0 <= shares["engine_no_work_share"] <= shares["engine_idle_share"] <= 1


@given(events=_EVENTS)
def test_shares_are_those_of_every_second_looked_at(events: list[tuple[int, object]]) -> None:
    world = World()
    for seconds, event in events:
        world.wait(seconds)
        match event:
            case (EngineId() as engine, EngineState() as state):
                world.report(engine, state)
            case (EngineId() as engine, bool() as holds):
                world.hold(engine, holds)
            case _:
                world.check_shares()
        world.idleness.check_integrity(world.holding)
    world.check_shares()


def test_a_hybrid_step_of_two_engines() -> None:
    world = World()
    for engine in (A, B):
        world.report(engine, EngineState.ASLEEP)
    world.wait(6)  # the ranks train
    for engine in (A, B):
        world.report(engine, EngineState.SERVING)
        world.hold(engine, True)
    world.wait(3)
    world.hold(A, False)
    world.wait(1)  # the last one finishes
    world.hold(B, False)

    shares = world.idleness.take_shares()

    assert shares["engine_idle_share"] == pytest.approx(13 / 20)
    assert shares["engine_no_work_share"] == pytest.approx(1 / 20)


def test_a_drain_is_work_and_frozen_requests_are_not() -> None:
    world = World()
    world.hold(A, True)
    world.report(A, EngineState.SERVING)
    world.report(A, EngineState.PAUSED)
    world.wait(2)  # it finishes what it has
    world.report(A, EngineState.UPDATING)
    world.wait(6)

    assert world.idleness.take_shares() == {"engine_idle_share": 0.75, "engine_no_work_share": 0.0}


def test_requests_of_the_last_incarnation_do_not_make_the_next_one_busy() -> None:
    world = World()
    world.report(A, EngineState.SERVING)
    world.hold(A, True)
    next_life = EngineId("a", 2)
    world.report(next_life, EngineState.SERVING)
    world.wait(1)
    world.hold(A, False)  # its link ends late
    world.hold(next_life, True)
    world.wait(1)

    assert world.idleness.take_shares() == {"engine_idle_share": 0.5, "engine_no_work_share": 0.5}


def test_a_pool_without_engines_has_no_shares() -> None:
    world = World()
    world.wait(5)

    assert world.idleness.take_shares() == {}
