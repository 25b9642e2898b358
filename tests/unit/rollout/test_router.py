"""Which engine gets a request, and how engines' speeds and idle times are measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.rollout.dispatch.pool_load import EngineIdleness
from umbra.runtime.rollout.dispatch.router import EngineId, EngineSpeed, Router

A, B, C = EngineId("a", 1), EngineId("b", 1), EngineId("c", 1)


def make_router(*engines: EngineId, max_inflight: int = 100, max_running: int = 1000) -> Router:
    router = Router(max_inflight, max_running)
    for engine in engines:
        router.set_serving(engine, True)
    return router


def test_the_engine_with_the_least_outstanding_tokens_is_chosen() -> None:
    router = make_router(A, B)
    router.charge(A, 100)
    router.charge(B, 50)

    assert router.choose(10) == B

    router.progress(A, 60)
    assert router.choose(10) == A


def test_a_cached_prefix_wins_over_a_little_more_load_only() -> None:
    router = make_router(A, B)
    router.charge(A, 16 * 10)

    assert router.choose(10, groups=A) == A, "sixteen such requests more than B has"

    router.charge(A, 1)
    assert router.choose(10, own=A) == B


def test_long_tailed_work_is_spread_evenly() -> None:
    budgets = (np.random.default_rng(3).pareto(1.5, 600).clip(0.05, 30) * 40 + 1).astype(int)
    router = make_router(A, B, C, max_inflight=1000)

    for budget in budgets.tolist():
        engine = router.choose(budget)
        assert engine is not None
        router.charge(engine, budget)

    loads = [router.outstanding_tokens(engine) for engine in (A, B, C)]
    assert max(loads) - min(loads) <= budgets.max()
    assert max(loads) <= 1.05 * budgets.sum() / 3


def measure(router: Router, tokens_per_s: dict[EngineId, int]) -> None:
    """Each engine gets a request, of ten tokens, and seems to be as fast as that."""
    for engine in tokens_per_s:
        router.charge(engine, 10)
    for now in range(21):
        for engine, num_tokens in tokens_per_s.items():
            router.measure(engine, num_tokens, float(now))


def test_a_slow_engine_gets_less() -> None:
    router = make_router(A, B, max_inflight=1000)
    measure(router, {A: 100, B: 300})

    for _ in range(400):
        engine = router.choose(10)
        assert engine is not None
        router.charge(engine, 10)

    assert router.outstanding_tokens(B) == pytest.approx(3 * router.outstanding_tokens(A), rel=0.02)
    assert router.fair_share(A) == pytest.approx(0.25)


@pytest.mark.parametrize("num_slots", [8, 64])
@pytest.mark.parametrize("speeds", [(100, 100), (100, 120)])
def test_no_request_waits_at_an_engine_while_another_could_begin_it(
    speeds: tuple[int, int], num_slots: int
) -> None:
    """Groups of sixteen prefer the engine of their first completion."""
    router = measured_router(dict(zip((A, B), speeds, strict=True)), num_slots)

    last: EngineId | None = None
    for n in range(2 * num_slots):
        last = router.choose(500, groups=last if n % 16 else None)
        assert last is not None
        router.charge(last, 500)

    assert [router.capacity_left(engine) for engine in (A, B)] == [num_slots // 4] * 2


def measured_router(tokens_per_s: dict[EngineId, int], num_slots: int) -> Router:
    """Engines without requests, of different speeds."""
    router = make_router(A, B, max_inflight=num_slots * 5 // 4, max_running=num_slots)
    measure(router, tokens_per_s)
    for engine in tokens_per_s:
        router.release(engine, 10)
    return router


def test_requests_wait_at_an_engine_that_is_twice_as_fast_as_those_that_could_begin_them() -> None:
    router = measured_router({A: 100, B: 200}, 64)

    for _ in range(128):
        engine = router.choose(500)
        assert engine is not None
        router.charge(engine, 500)

    assert [router.capacity_left(engine) for engine in (A, B)] == [32, 0]


def test_a_turn_rather_waits_at_the_engine_that_has_its_tokens_than_begins_at_another() -> None:
    router = measured_router({A: 100, B: 100}, 64)
    for engine, num_held in ((A, 64), (B, 56)):
        for _ in range(num_held):
            router.charge(engine, 500)

    assert router.choose(500, own=A) == A
    assert router.choose(500, groups=A) == B


def test_an_engine_not_measured_yet_counts_as_the_mean_of_the_others() -> None:
    router = make_router(A, B)
    measure(router, {A: 100, B: 300})

    router.set_serving(C, True)

    assert router.fair_share(C) == pytest.approx(1 / 3)
    router.check_integrity()


def test_the_next_incarnation_of_an_engine_inherits_its_speed() -> None:
    router = make_router(A, B)
    measure(router, {A: 100, B: 300})

    router.remove(A)
    again = EngineId("a", 2)
    router.set_serving(again, True)

    assert router.fair_share(again) == pytest.approx(0.25)
    router.check_integrity()


def test_an_engine_that_once_stalled_is_tried_again() -> None:
    router = make_router(A, B, max_inflight=1000)
    measure(router, {A: 0, B: 300})
    router.measure(A, 1, 21.0)
    router.release(A, 10)

    chosen = [router.choose(10)]
    while chosen[-1] != A and len(chosen) < 20:
        router.charge(B, 10)
        chosen.append(router.choose(10))

    assert chosen.count(B) in range(2, 10), "less, but not nothing"


@pytest.mark.parametrize("why", ["not serving", "idle"])
def test_a_pause_is_not_taken_for_slowness(why: str) -> None:
    router = make_router(A, B)
    measure(router, {A: 100, B: 100})

    if why == "idle":
        router.release(A, 10)
        router.charge(A, 10)
    else:
        router.set_serving(A, False)
        router.set_serving(A, True)
    router.measure(A, 100, 1000.0)
    router.measure(A, 100, 1001.0)

    assert router.fair_share(A) == pytest.approx(0.5)


def test_affinity_is_worth_less_on_a_slow_engine() -> None:
    router = make_router(A, B, max_inflight=1000)
    measure(router, {A: 100, B: 800})
    assert router.choose(10, own=A) == A

    router.charge(A, 30)

    assert router.choose(10, own=A) == B, "forty tokens there take longer than 320 here"


class CheckedRouter:
    """A router beside a naive model that counts everything from scratch."""

    def __init__(self, max_inflight: int) -> None:
        self.router = Router(max_inflight, max(1, max_inflight - 1))
        self.max_inflight = max_inflight
        self.now = 0.0
        self.held: dict[EngineId, list[int]] = {}  # the unspent cost of each request
        self.serving: set[EngineId] = set()

    def do(self, what: str, engine: EngineId, amount: int) -> None:
        self.now += amount / 50
        held = self.held.get(engine)
        match what:
            case "serve" | "pause":
                self.router.set_serving(engine, what == "serve")
                self.held.setdefault(engine, [])
                (self.serving.add if what == "serve" else self.serving.discard)(engine)
            case "remove":
                self.router.remove(engine)
                self.held.pop(engine, None)
                self.serving.discard(engine)
            case "request":
                self._request(amount, engine)
            case "tokens" if held:
                made = min(amount, held[0])
                self.router.measure(engine, made, self.now)
                self.router.progress(engine, made)
                held[0] -= made
            case "end" if held:
                self.router.release(engine, held.pop(amount % len(held)))
            case _:  # of an engine that has nothing, or is gone
                self.router.measure(engine, amount, self.now)
                if held is None:
                    self.router.progress(engine, amount)
                    self.router.release(engine, amount)

    def _request(self, cost: int, prefer: EngineId) -> None:
        chosen = self.router.choose(cost, groups=prefer)
        has_capacity = {e for e in self.serving if len(self.held[e]) < self.max_inflight}
        if chosen is None:
            assert not has_capacity
            return
        assert chosen in has_capacity
        self.router.charge(chosen, cost)
        self.held[chosen].append(cost)

    def check(self) -> None:
        self.router.check_integrity()
        assert self.router.serving == sorted(self.serving)
        for engine, held in self.held.items():
            assert self.router.outstanding_tokens(engine) == sum(held)
            assert self.router.capacity_left(engine) == self.max_inflight - len(held)
        shares = [self.router.fair_share(engine) for engine in self.serving]
        assert sum(shares) == pytest.approx(1.0 if shares else 0.0)
        assert all(share > 0 for share in shares)


ACTIONS = ("serve", "pause", "remove", "request", "request", "tokens", "tokens", "end")
ENGINES = (A, B, C, EngineId("a", 2))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.sampled_from(ENGINES), st.integers(1, 100)),
        max_size=60,
    ),
)
def test_nothing_is_counted_twice_or_lost(
    max_inflight: int, actions: list[tuple[str, EngineId, int]]
) -> None:
    checked = CheckedRouter(max_inflight)

    for engine in (A, B):
        checked.do("serve", engine, 1)
    for what, engine, amount in actions:
        checked.do(what, engine, amount)
        checked.check()


def measured(tokens_per_s: float, num_requests: int, seconds: float = 30.0) -> EngineSpeed:
    """The measured speed of an engine that was this fast, from batches of half a second."""
    speed = EngineSpeed()
    feed(speed, tokens_per_s, num_requests, 0.0, seconds)
    return speed


def feed(
    speed: EngineSpeed, tokens_per_s: float, num_requests: int, start_s: float, stop_s: float
) -> None:
    for tick in range(int(start_s * 2), int(stop_s * 2) + 1):
        speed.observe(int(tokens_per_s / 2), num_requests, tick / 2)


def test_an_engine_that_makes_a_third_of_the_tokens_has_a_third_of_the_speed() -> None:
    assert measured(300, 8).value == pytest.approx(measured(100, 8).value * 3)


def test_a_batch_or_two_are_no_measurement() -> None:
    speed = EngineSpeed()
    assert speed.value == 0

    speed.observe(50, 1, 10.0)
    speed.observe(50, 1, 10.3)
    assert speed.value == 0

    speed.observe(50, 1, 10.6)
    assert speed.value == pytest.approx(100 / 0.6)


@pytest.mark.parametrize("growth", [1.0, 0.5, 0.0])
def test_the_engine_with_less_to_do_seems_no_slower_than_it_has_less_to_do(growth: float) -> None:
    """Tokens a second grow with the requests, or with their square root, or not at all."""
    few, many = measured(20 * 4**growth, 4), measured(20 * 64**growth, 64)

    assert 4 / few.value < 64 / many.value


def test_idle_time_does_not_count() -> None:
    speed = measured(100, 4)
    before = speed.value

    speed.pause()
    feed(speed, 100, 4, 1000, 1010)
    assert speed.value == pytest.approx(before)

    speed.observe(0, 0, 2000.0)  # nothing is in flight: a pause as well
    feed(speed, 100, 4, 3000, 3010)
    assert speed.value == pytest.approx(before)


def test_an_engine_that_is_throttled_is_noticed_within_a_few_times_ten_seconds() -> None:
    speed = measured(300, 8)

    feed(speed, 100, 8, 30.5, 60)

    assert speed.value == pytest.approx(measured(100, 8).value, rel=0.15)


A_AGAIN = EngineId("a", 2)

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
