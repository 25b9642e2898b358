"""Scores of evaluations: pass@k against all subsets, intervals of the accuracy against published
ones, and the sets of a prompt file."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from umbra.runtime.rollout.manager.evaluation import (
    accuracy_interval,
    evaluation_scores,
    pass_at_k,
)
from umbra.runtime.rollout.rollout_config import DispatchConfig, RolloutConfig


def make_config(**fields: object) -> RolloutConfig:
    return RolloutConfig(
        dispatch=DispatchConfig(pool="policy", max_context_len=16),
        prompts_path="p",
        world_size=1,
        worker_names=("w",),
        **fields,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(k: int) -> None:
    for num_right in range(6):
        samples = [True] * num_right + [False] * (5 - num_right)
        subsets = list(combinations(samples, k))

        found = pass_at_k(np.asarray([num_right]), 5, k)

        assert found == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("num_right", "num_prompts", "published"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_one_sample_a_prompt_has_wilsons_interval(
    num_right: int, num_prompts: int, published: tuple[float, float]
) -> None:
    """Newcombe 1998, Statistics in Medicine 17:857, table I, method 3."""
    shares = np.asarray([1.0] * num_right + [0.0] * (num_prompts - num_right))

    assert accuracy_interval(shares, 1) == pytest.approx(published, abs=5e-5)


def test_several_samples_a_prompt_are_clustered() -> None:
    """By hand: the shares 0, 0.5, 0.5, 0.75 have a mean of 0.4375, squared deviations that add up
    to 0.296875, and so a standard error of (0.296875 / 3 / 4) ** 0.5 = 0.157288."""
    found = accuracy_interval(np.asarray([0.0, 0.5, 0.5, 0.75]), 4)

    assert found == pytest.approx((0.4375 - 0.308279, 0.4375 + 0.308279), abs=1e-6)


def test_intervals_stay_between_0_and_1_and_have_a_width() -> None:
    assert accuracy_interval(np.asarray([0.0, 0.0, 0.5]), 2)[0] == 0.0
    assert accuracy_interval(np.asarray([1.0, 1.0, 0.5]), 2)[1] == 1.0
    all_right = np.ones(20)
    assert accuracy_interval(all_right, 8) == accuracy_interval(all_right, 1)
    assert accuracy_interval(all_right, 8) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)


def test_each_set_has_scores_of_its_own() -> None:
    config = make_config(eval_sets={"easy": 1, "hard": 2}, accuracy_threshold=0.5)
    rewards = np.asarray([[1, 1, 1], [1, 0, 0], [0, 0.25, 0]], np.float32)

    scores = evaluation_scores(rewards, config)

    assert scores["num_prompts"] == 3
    assert scores["accuracy"] == pytest.approx(4 / 9)
    assert scores["sets"]["easy"]["pass_at"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    hard = scores["sets"]["hard"]
    assert (hard["num_prompts"], hard["accuracy"]) == (2, pytest.approx(1 / 6))
    assert hard["accuracy_interval"] == accuracy_interval(np.asarray([1 / 3, 0.0]), 3)
    assert hard["pass_at"] == pytest.approx({"1": 1 / 6, "2": 1 / 3, "3": 1 / 2})
    assert hard["mean_reward"] == pytest.approx(1.25 / 6)


def test_one_greedy_completion_each_has_no_more_than_an_accuracy() -> None:
    scores = evaluation_scores(np.asarray([[1], [0]], np.float32), make_config())

    assert scores["pass_at"] == {"1": scores["accuracy"]} == {"1": 0.5}
    assert scores["sets"] == {}
