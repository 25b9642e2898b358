from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.runtime.rollout.dispatch.router import EngineId, Router

A, B, C = EngineId("a", 1), EngineId("b", 1), EngineId("c", 1)


def make_router(*engines: EngineId, max_inflight: int = 100) -> Router:
    router = Router(max_inflight)
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

    assert router.choose(10, prefer=[None, A]) == A, "sixteen such requests more than B has"

    router.charge(A, 1)
    assert router.choose(10, prefer=[A]) == B


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
    assert router.choose(10, prefer=[A]) == A

    router.charge(A, 30)

    assert router.choose(10, prefer=[A]) == B, "forty tokens there take longer than 320 here"


class CheckedRouter:
    """A router beside a naive model that counts everything from scratch."""

    def __init__(self, max_inflight: int) -> None:
        self.router = Router(max_inflight)
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
        chosen = self.router.choose(cost, (None, prefer))
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
