"""Scores of evaluations: pass@k against all subsets, intervals, and the sets of a prompt file."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from umbra.runtime.rollout.accuracy_statistics import mean_interval
from umbra.runtime.rollout.manager.evaluation import evaluation_scores, pass_at_k
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


def test_intervals_stay_between_0_and_1_and_have_a_width() -> None:
    def interval(*rewards: list[int]) -> tuple[float, float]:
        return evaluation_scores(np.asarray(rewards, np.float32), make_config())[
            "accuracy_interval"
        ]

    assert interval([0, 0], [0, 0], [0, 1])[0] == 0.0
    assert interval([1, 1], [1, 1], [0, 1])[1] == 1.0
    assert interval(*[[1]] * 20) == interval(*[[1] * 8] * 20)
    assert interval(*[[1]] * 20) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)


def test_each_set_has_scores_of_its_own() -> None:
    config = make_config(eval_sets={"easy": 1, "hard": 2}, accuracy_threshold=0.5)
    rewards = np.asarray([[1, 1, 1], [1, 0, 0], [0, 0.25, 0]], np.float32)

    scores = evaluation_scores(rewards, config)

    assert scores["num_prompts"] == 3
    assert scores["accuracy"] == pytest.approx(4 / 9)
    assert scores["sets"]["easy"]["pass_at"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    hard = scores["sets"]["hard"]
    assert (hard["num_prompts"], hard["accuracy"]) == (2, pytest.approx(1 / 6))
    assert hard["accuracy_interval"][1] == mean_interval(np.asarray([1 / 3, 0.0]), 3)[1]
    assert scores["num_right"] == [3, 1, 0]
    assert hard["pass_at"] == pytest.approx({"1": 1 / 6, "2": 1 / 3, "3": 1 / 2})
    assert hard["mean_reward"] == pytest.approx(1.25 / 6)


def test_one_greedy_completion_each_has_no_more_than_an_accuracy() -> None:
    scores = evaluation_scores(np.asarray([[1], [0]], np.float32), make_config())

    assert scores["pass_at"] == {"1": scores["accuracy"]} == {"1": 0.5}
    assert scores["sets"] == {}
