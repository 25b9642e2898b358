"""Simulates how long engines need for long-tailed work under several policies. Deterministic.

Nobody knows a request's length beforehand: all cost the same when they are routed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from router_simulation import (
    CAP,
    EngineKind,
    LeastRequests,
    Result,
    RoundRobin,
    Simulation,
    lower_bound_s,
)

from umbra.runtime.rollout.dispatch.router import Router

KINDS: Final = {
    "memory-bound": EngineKind(base_s=0.02, request_s=0.0001),
    "between": EngineKind(base_s=0.01, request_s=0.0004),
    "compute-bound": EngineKind(base_s=0.001, request_s=0.001),
}
POLICIES: Final[dict[str, type[Router]]] = {
    "round robin": RoundRobin,
    "least requests": LeastRequests,
    "by speed": Router,
}
SCENARIOS: Final = ("equal", "one slow", "one joins", "one leaves")
MAX_OPEN: Final = 112  # of the 128 requests that four engines run at a time


def engines_of(scenario: str, kind: EngineKind) -> list[EngineKind]:
    match scenario:
        case "one slow":
            first = replace(kind, slowness=3.0)
        case "one joins":
            first = replace(kind, joins_s=20.0)
        case "one leaves":
            first = replace(kind, leaves_s=20.0)
        case _:
            first = kind
    return [first, kind, kind, kind]


def lengths_of(tail: str, seed: int, count: int) -> list[int]:
    """Lengths with a mean of about 300; the longest are cut at the cap."""
    rng = np.random.default_rng(seed)
    if tail == "Pareto":
        drawn = (rng.pareto(1.5, count) + 1) * 110
    else:
        drawn = rng.lognormal(5.3, 1.0, count)
    return drawn.clip(1, CAP).astype(int).tolist()


def simulate(policy: str, engines: Sequence[EngineKind], lengths: Sequence[int]) -> Result:
    router = POLICIES[policy](64)
    result = Simulation(router, engines, lengths, MAX_OPEN).run()
    router.check_integrity()
    return result


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_little_work_is_done_in_time(scenario: str) -> None:
    engines = engines_of(scenario, KINDS["between"])
    lengths = lengths_of("log-normal", 0, 480)
    bound_s = lower_bound_s(engines, lengths, MAX_OPEN)

    ours, least_requests = (
        simulate(policy, engines, lengths) for policy in ("by speed", "least requests")
    )

    assert bound_s <= ours.makespan_s <= 2.5 * bound_s
    assert ours.makespan_s <= 1.05 * least_requests.makespan_s


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_engines_are_used_as_well_as_their_speeds_allow(kind: str, scenario: str) -> None:
    engines = engines_of(scenario, KINDS[kind])
    # Taking turns is compared only where the engines differ.
    policies = [name for name in POLICIES if scenario == "one slow" or name != "round robin"]
    results: dict[str, list[Result]] = {policy: [] for policy in policies}
    ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    for tail, seed in (("log-normal", 0), ("log-normal", 1), ("Pareto", 2)):
        lengths = lengths_of(tail, seed, 640)
        bound_s = lower_bound_s(engines, lengths, MAX_OPEN)
        # The longest may be the last to be begun, and on the slowest engine.
        longest_s = max(lengths) * max(engine.step_s(engine.slots) for engine in engines)
        for policy in policies:
            result = simulate(policy, engines, lengths)
            assert sum(result.tokens.values()) >= sum(lengths)
            assert bound_s <= result.makespan_s
            results[policy].append(result)
            ratios[policy].append(result.makespan_s / bound_s)
        assert results["by speed"][-1].makespan_s <= bound_s + longest_s

    mean = {policy: float(np.mean(values)) for policy, values in ratios.items()}
    for policy, ratio in mean.items():
        idle = np.mean([result.idle_share for result in results[policy]])
        print(f"{kind} | {scenario} | {policy} | {ratio:.2f} | {idle:.2f}")
    assert mean["by speed"] <= (2.6 if scenario == "one slow" else 1.9)
    assert mean["by speed"] <= 1.03 * mean["least requests"]
    if scenario == "one slow":
        assert mean["by speed"] <= 0.95 * mean["least requests"]
        assert mean["by speed"] <= 0.8 * mean["round robin"]


def test_the_samples_of_a_group_go_where_its_prompt_is() -> None:
    """Eight share a prompt: scattered, each engine would prefill it for two of them."""
    engines = engines_of("equal", KINDS["between"])
    router = Router(64)
    simulation = Simulation(router, engines, lengths_of("log-normal", 1, 480), MAX_OPEN)

    simulation.run()

    homes = [
        len({sample.last_engine for sample in group.trajectories}) for group in simulation.groups
    ]
    assert np.mean(homes) < 1.5
