from __future__ import annotations

import numpy as np

from umbra.runtime.rollout.router import EngineId, Router

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


def test_nothing_goes_to_an_engine_that_does_not_serve() -> None:
    router = make_router(A, B)
    router.set_serving(A, False)

    assert router.choose(10, prefer=[A]) == B

    router.set_serving(B, False)
    assert router.choose(10) is None


def test_a_full_engine_gets_nothing_until_one_request_ends() -> None:
    router = make_router(A, max_inflight=1)
    router.charge(A, 10)

    assert router.choose(10) is None

    router.release(A, 10)
    assert router.choose(10) == A
    router.check_integrity()


def test_a_cached_prefix_wins_over_a_little_more_load_only() -> None:
    router = make_router(A, B)
    router.charge(A, 50)

    assert router.choose(10, prefer=[None, A]) == A

    router.charge(A, 500)
    assert router.choose(10, prefer=[A]) == B


def test_an_engine_that_is_gone_is_forgotten_with_its_load() -> None:
    router = make_router(A, B)
    router.charge(A, 500)

    router.remove(A)
    router.progress(A, 10)
    router.release(A, 490)

    assert router.choose(10, prefer=[A]) == B
    assert router.serving == [B]
    router.check_integrity()


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


def test_no_engine_idles_while_requests_wait() -> None:
    """Simulated: a token a tick for each running request, four at a time on each engine."""
    lengths = (np.random.default_rng(3).pareto(1.5, 200).clip(0.05, 30) * 40 + 1).astype(int)
    router = make_router(A, B, C, max_inflight=4)
    running: dict[EngineId, list[int]] = {A: [], B: [], C: []}
    waiting = lengths.tolist()

    while waiting or any(running.values()):
        while waiting and (engine := router.choose(waiting[0])):
            router.charge(engine, waiting[0])
            running[engine].append(waiting.pop(0))
        assert not waiting or all(len(held) == 4 for held in running.values())
        for engine, held in running.items():
            router.progress(engine, len(held))
            running[engine] = [length - 1 for length in held if length > 1]
            for _ in range(len(held) - len(running[engine])):
                router.release(engine, 0)
        router.check_integrity()
