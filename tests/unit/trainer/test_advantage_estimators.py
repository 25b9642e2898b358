"""Advantage estimators, and how a rank applies them to the groups of its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from minimal_config import MINIMAL
from numpy.typing import NDArray

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.agents.reward_function import REWARD_LIMIT
from umbra.trainer.algorithms.advantages import (
    batch_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    normalize_over_batch,
    reinforce_advantages,
    rloo_advantages,
)
from umbra.trainer.algorithms.base import AdvantageEstimator
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.train_batch import ADVANTAGES, TrainBatch
from umbra.trainer.run_parts import TrainingRun

ESTIMATORS = (grpo_advantages, dr_grpo_advantages, rloo_advantages, maxrl_advantages)


def test_advantages_are_those_of_other_trainers() -> None:
    rewards = np.asarray([1, 0, 0, 1], np.float32)

    # The sample's standard deviation is sqrt(4 x 0.25 / 3); torch.std is that by default.
    expected = 0.5 * 3**0.5 * np.asarray([1, -1, -1, 1])
    assert grpo_advantages(rewards) == pytest.approx(expected, abs=1e-3)
    assert dr_grpo_advantages(rewards) == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.25, -2.0]

    expected = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert rloo_advantages(np.asarray(rewards, np.float32)) == pytest.approx(expected)


def test_maxrl_weights_a_prompt_by_one_over_its_success_rate() -> None:
    rewards = np.asarray([1, 0, 0, 0], np.float32)

    # The paper averages the score functions of the successes, less that of all samples.
    assert maxrl_advantages(rewards) == pytest.approx([4 - 1, -1, -1, -1])
    assert not maxrl_advantages(np.asarray([0, -1], np.float32)).any()


def test_reinforce_has_no_baseline() -> None:
    rewards = np.asarray([1, 0.5, -2], np.float32)

    assert reinforce_advantages(rewards).tolist() == rewards.tolist()


def test_groups_that_teach_nothing_still_do_so_after_a_normalization_over_the_batch() -> None:
    generator = np.random.default_rng(0)
    groups = [grpo_advantages(generator.random(8, np.float32)) for _ in range(20)]

    advantages = normalize_over_batch(torch.tensor([*np.concatenate(groups), *[0.0] * 8])).numpy()

    assert not advantages[-8:].any()
    assert advantages.std(ddof=1) == pytest.approx(1.0, abs=1e-3)


def test_equal_advantages_of_a_batch_become_zeros() -> None:
    assert not normalize_over_batch(torch.full((5,), 3.0)).any()
    assert not normalize_over_batch(torch.full((1,), 3.0)).any()


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_equal_rewards_give_exact_zeros(estimate: AdvantageEstimator, value: float) -> None:
    assert not estimate(np.full(7, value, np.float32)).any()


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("others", [1, 15])
def test_rewards_at_their_limit_give_finite_advantages(
    estimate: AdvantageEstimator, others: int
) -> None:
    rewards = np.asarray([REWARD_LIMIT, *([-REWARD_LIMIT] * others)], np.float32)

    advantages = estimate(rewards)

    assert np.isfinite(advantages).all()
    if estimate is not maxrl_advantages:  # whose mean is not positive here
        assert advantages[0] > 0 > advantages[1]


def columns_of(
    group_rewards: list[float], group_offsets: list[int], reward_indices: list[int]
) -> dict[str, Any]:
    """A rank's columns with samples of one prompt token and one generated token."""
    count = len(reward_indices)
    return {
        "tokens": np.zeros(2 * count, np.int32),
        "offsets": np.arange(0, 2 * count + 1, 2, dtype=np.int32),
        "prompt_lens": np.ones(count, np.int32),
        "mask": np.tile(np.asarray([0, 1], np.uint8), count),
        "logprobs": np.zeros(2 * count, np.float32),
        "versions": np.zeros(2 * count, np.int64),
        "sample_ids": [f"0/{idx}" for idx in reward_indices],
        "group_rewards": np.asarray([group_rewards], np.float32),
        "group_offsets": np.asarray(group_offsets, np.int32),
        "reward_indices": np.asarray(reward_indices, np.int32),
        "mini_batches": [[[list(range(count))], 4, 4]],
        "metrics": {},
    }


def token_advantages(
    columns: dict[str, Any], estimate: AdvantageEstimator = grpo_advantages
) -> list[float]:
    """By token."""
    batch = TrainBatch.from_answer(columns)
    groups = batch.groups
    of_groups = batch_advantages(estimate, groups.rewards, groups.offsets)
    batch.add_advantages(batch.of_samples(of_groups))
    return batch.columns[ADVANTAGES].tolist()


def test_samples_of_a_group_that_ranks_share_get_the_advantages_of_the_whole_group() -> None:
    first = columns_of([0.0, 1.0, 5.0], [0, 3], [0, 2])
    second = columns_of([0.0, 1.0, 5.0, 4.0, 2.0], [0, 3, 5], [1, 3, 4])

    advantages = [token_advantages(columns) for columns in (first, second)]

    whole = grpo_advantages(np.asarray([0, 1, 5], np.float32))
    other = grpo_advantages(np.asarray([4, 2], np.float32))
    assert advantages[0] == np.repeat([whole[0], whole[2]], 2).tolist()
    assert advantages[1] == np.repeat([whole[1], *other], 2).tolist()


def test_a_rank_without_samples_has_no_advantages() -> None:
    assert token_advantages(columns_of([], [0], [])) == []


def too_few(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    return rewards[1:]


def not_finite(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.full_like(rewards, np.nan)


@pytest.mark.parametrize("estimate", [too_few, not_finite])
def test_what_a_users_estimator_must_not_return_is_shown(estimate: AdvantageEstimator) -> None:
    columns = columns_of([0.5, 1.0], [0, 2], [0, 1])

    with pytest.raises(UmbraError, match=r"for the rewards \[0.5, 1.0\]: return one finite number"):
        token_advantages(columns, estimate)


def gdpo_by_loops(rewards: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """The paper's sum before the batch normalization, of one group and [K, G] rewards. NaN counts
    nowhere."""
    sums = [0.0] * len(rewards[0])
    for row, weight in zip(rewards, weights, strict=True):
        known = [reward for reward in row if not math.isnan(reward)]
        mean = math.fsum(known) / len(known)
        spread = math.fsum((reward - mean) ** 2 for reward in known)
        std = math.sqrt(spread / (len(known) - 1))
        for idx, reward in enumerate(row):
            if not math.isnan(reward):
                sums[idx] += weight * (reward - mean) / (std + 1e-4)
    return sums


def test_rewards_that_are_compared_apart_add_up_by_weight() -> None:
    generator = np.random.default_rng(0)
    rewards = generator.normal(0, [[1], [100], [0.01]], (3, 9)).astype(np.float32)
    rewards[1, [2, 7]] = math.nan
    weights = (1.0, 0.5, -2.0)

    found = batch_advantages(grpo_advantages, rewards, np.asarray([0, 4, 9], np.int32), weights)

    expected = [
        number
        for group in (slice(0, 4), slice(4, 9))
        for number in gdpo_by_loops(rewards[:, group].tolist(), weights)
    ]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_run_weights_each_part_of_its_rewards() -> None:
    functions = {"exact": "rewards:exact", "short": "rewards:short"}
    reward = {"functions": functions, "weights": {"short": 0.2}, "overlong_buffer": 9}
    values = {**MINIMAL, "reward": {**reward, "overlong_penalty": 3.0}}
    config = check_config(TrainerConfig, values, "config", ["train.advantage=gdpo"])
    rows = {"exact": [1.0, 0.0], "short": [0.0, 1.0], "overlong": [-1.0, 0.0]}
    rewards = np.asarray([rows[name] for name in config.compared_parts], np.float32)
    groups = SimpleNamespace(rewards=rewards, offsets=np.asarray([0, 2]))
    found: list[float] = []
    batch: Any = SimpleNamespace(groups=groups, of_samples=list, add_advantages=found.extend)
    run: Any = SimpleNamespace(config=config, _estimate=dr_grpo_advantages)

    TrainingRun.add_advantages(run, batch)

    # (1 - 0.2 - 3) / 2
    assert found == pytest.approx([-1.1, 1.1])


def test_a_reward_that_applies_to_one_sample_or_to_none_teaches_nothing() -> None:
    rewards = np.asarray([[math.nan, math.nan, 3.0], [math.nan] * 3], np.float32)

    found = batch_advantages(grpo_advantages, rewards, np.asarray([0, 3], np.int32), (1.0, 1.0))

    assert found.tolist() == [0.0, 0.0, 0.0]
