"""Engine-seconds by use, against a model that looks at every engine in every second."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.rollout.dispatch.pool_load import EngineIdleness
from umbra.runtime.rollout.dispatch.router import EngineId

A, A_AGAIN = EngineId("a", 1), EngineId("a", 2)

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


@example(  # a drain is work, frozen requests are not
    [
        (0, (A, EngineState.SERVING)),
        (0, (A, True)),
        (0, (A, EngineState.PAUSED)),
        (2, (A, EngineState.UPDATING)),
        (6, "take"),
    ]
)
@example(  # the link of the last incarnation ends late
    [
        (0, (A, EngineState.SERVING)),
        (0, (A, True)),
        (0, (A_AGAIN, EngineState.SERVING)),
        (1, (A, False)),
        (0, (A_AGAIN, True)),
        (1, "take"),
    ]
)
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
