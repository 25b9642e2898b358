from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umbra.runtime.rollout.buffer.batch_plan import RankPlan, plan_batch
from umbra.runtime.rollout.dispatch.group import GroupShape

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
