from __future__ import annotations

import heapq
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umbra.runtime.rollout.dispatch.trajectory import GroupShape
from umbra.runtime.rollout.manager import batch_answers
from umbra.runtime.rollout.manager.batch_answers import RankPlan, plan_batch

GROUPS = st.lists(
    st.builds(
        GroupShape, st.integers(0, 200), st.lists(st.integers(0, 500), min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=12,
)


def micro_batch_costs(groups: Sequence[GroupShape], plan: RankPlan) -> list[int]:
    """Tokens to compute: completions, and each distinct prompt once."""
    flat = [(idx, length) for idx, group in enumerate(groups) for length in group.lengths]
    costs: list[int] = []
    for micro in plan.micro_batches:
        members = [flat[plan.samples[at]] for at in micro]
        prompts = sum(groups[idx].prompt_len for idx in {idx for idx, _ in members})
        costs.append(prompts + sum(length for _, length in members))
    return costs


def check_plan(groups: Sequence[GroupShape], plans: list[RankPlan]) -> None:
    dealt = sorted(sample for plan in plans for sample in plan.samples)
    assert dealt == list(range(sum(len(group.lengths) for group in groups))), "each exactly once"
    assert len({len(plan.micro_batches) for plan in plans}) == 1, "equal counts"
    assert plans[0].micro_batches, "at least one micro-batch"
    for plan in plans:
        used = sorted(at for micro in plan.micro_batches for at in micro)
        assert used == list(range(len(plan.samples)))
        assert plan.samples == sorted(plan.samples)


@given(GROUPS, st.integers(1, 8), st.integers(1, 5))
def test_a_fixed_number_of_micro_batches_holds_every_sample_once(
    groups: list[GroupShape], world_size: int, num_micro_batches: int
) -> None:
    plans = plan_batch(groups, world_size, num_micro_batches=num_micro_batches)

    check_plan(groups, plans)
    assert len(plans[0].micro_batches) <= num_micro_batches


@pytest.mark.slow
@settings(max_examples=300)
@example([GroupShape(2, [0, 0])], 1, 1)
@given(GROUPS, st.integers(1, 8), st.integers(1, 2000))
def test_a_token_cap_is_kept_but_for_samples_beyond_it(
    groups: list[GroupShape], world_size: int, cap: int
) -> None:
    plans = plan_batch(groups, world_size, max_tokens_per_micro_batch=cap)

    check_plan(groups, plans)
    for plan in plans:
        for micro, cost in zip(plan.micro_batches, micro_batch_costs(groups, plan), strict=True):
            assert cost <= cap or len(micro) == 1


def test_one_micro_batch_more_rather_than_a_little_beyond_the_token_cap() -> None:
    groups = [GroupShape(2, [2])] * 3

    (plan,) = plan_batch(groups, world_size=1, max_tokens_per_micro_batch=10)

    assert sorted(micro_batch_costs(groups, plan)) == [4, 8]


def test_fewer_samples_than_ranks_leave_padding() -> None:
    plans = plan_batch([GroupShape(3, [5, 9])], world_size=4, num_micro_batches=3)

    assert [plan.micro_batches for plan in plans].count([[]]) == 2
    assert sum(len(plan.samples) for plan in plans) == 2


def test_groups_stay_together_where_they_can() -> None:
    groups = [GroupShape(50, [100 + idx] * 8) for idx in range(16)]

    plans = plan_batch(groups, world_size=4, num_micro_batches=2)

    for plan in plans:
        for micro in plan.micro_batches:
            members = [plan.samples[at] // 8 for at in micro]
            assert all(members.count(group) == 8 for group in members)


def test_a_group_beyond_its_fair_share_is_split() -> None:
    groups = [GroupShape(10, [800] * 8), *(GroupShape(10, [10] * 8) for _ in range(7))]

    costs = [sum(micro_batch_costs(groups, plan)) for plan in plan_batch(groups, world_size=4)]

    assert max(costs) <= 1.1 * min(costs)


def test_ranks_meet_after_micro_batches_of_about_equal_cost() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, (64, 8)).astype(int).clip(1, 4000)
    groups = [GroupShape(100, own) for own in lengths.tolist()]

    plans = plan_batch(groups, world_size=4, max_tokens_per_micro_batch=8000)

    costs = np.asarray([micro_batch_costs(groups, plan) for plan in plans])
    assert costs.max(axis=0).sum() <= 1.1 * costs.sum() / 4
    ideal = (100 * 64 + lengths.sum()) / (4 * 8000)
    assert costs.shape[1] <= 1.3 * ideal + 1


def _lognormal(num_groups: int, group_size: int, mean: int) -> list[GroupShape]:
    """Groups whose longest samples are eight times the mean."""
    own = np.random.default_rng(0).lognormal(0, 0.7, (num_groups, group_size)) * mean
    return [GroupShape(200, lengths) for lengths in own.astype(int).clip(1, 8 * mean).tolist()]


# The plans of a search that tried every number of micro-batches, and of pieces of a group.
@pytest.mark.parametrize(
    ("num_groups", "group_size", "mean", "world_size", "cap", "num_micro_batches", "cost"),
    [
        (64, 8, 1000, 8, 8192, 14, 85_339),
        (16, 16, 4000, 4, 16_384, 22, 343_503),
        (8, 64, 4000, 8, 32_768, 11, 330_897),
        (16, 32, 500, 8, 16_384, 5, 44_083),
        (64, 8, 500, 16, 8192, 4, 22_390),
        (8, 32, 2000, 16, 4096, 11, 53_939),
        (4, 64, 1000, 4, 0, 1, 88_026),
        (32, 8, 1000, 8, 0, 1, 42_449),
    ],
)
def test_a_plan_is_as_good_as_that_of_an_exhaustive_search(
    num_groups: int,
    group_size: int,
    mean: int,
    world_size: int,
    cap: int,
    num_micro_batches: int,
    cost: int,
) -> None:
    groups = _lognormal(num_groups, group_size, mean)

    plans = plan_batch(groups, world_size, max_tokens_per_micro_batch=cap)

    costs = np.asarray([micro_batch_costs(groups, plan) for plan in plans])
    assert costs.shape[1] <= num_micro_batches
    assert costs.max(axis=0).sum() <= 1.01 * cost


@pytest.mark.parametrize("cap", [0, 3000, 16_384])
def test_planning_takes_a_few_steps_for_each_sample_however_large_the_groups(
    monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    num_steps = 0

    def counted(step: Any) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            return step(*arguments)

        return run

    steps = {name: counted(getattr(heapq, name)) for name in ("heappush", "heappop", "heapreplace")}
    monkeypatch.setattr(batch_answers, "heapq", SimpleNamespace(**steps))

    plan_batch(_lognormal(4, 256, 4000), world_size=8, max_tokens_per_micro_batch=cap)

    assert num_steps <= 6 * 4 * 256
