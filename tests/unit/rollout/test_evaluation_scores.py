"""Scores of held-out prompts: samples that are kept, intervals, comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray
from rollout_samples import arrays, make_trajectory

from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.manager.evaluation import (
    compare_pairs,
    evaluation_scores,
    mean_interval,
    pass_at_k,
    worst_and_best,
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


def group_with(rewards: Sequence[float]) -> Group:
    """One sample for each reward, whose only token is its index."""
    samples = [make_trajectory() for _ in rewards]
    for idx, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        sample.append_generated(*arrays([idx]), 0)
        sample.reward = reward
        sample.finish("stop")
    return Group("eval", samples)


def test_the_worst_and_the_best_are_chosen() -> None:
    groups = [group_with([0.5, -1.0, 3.0, 0.0]), group_with([0.25, 2.0, 1.0, 0.75])]

    found = worst_and_best(groups)

    assert [sample["reward"] for sample in found] == [-1.0, 0.0, 0.25, 1.0, 2.0, 3.0]
    assert [sample["tokens"] for sample in found] == [[1], [3], [0], [2], [1], [2]]


def test_none_occurs_twice_where_there_are_few() -> None:
    found = worst_and_best([group_with([1.0, 0.0, 0.5, 0.5])])

    assert [sample["tokens"] for sample in found] == [[1], [2], [3], [0]]


def test_turns_and_their_versions_are_kept() -> None:
    sample = make_trajectory([1, 2])
    sample.append_generated(*arrays([10, 11]), 3)
    sample.extend_context(np.asarray([1, 2, 10, 11, 90], np.int32))
    sample.append_generated(*arrays([12]), 4)
    sample.finish("stop")
    sample.reward = 1.0

    assert worst_and_best([Group("eval", [sample])]) == [
        {
            "prompt_id": "p",
            "prompt_tokens": [1, 2],
            "num_prompt_tokens": 2,
            "tokens": [10, 11, 90, 12],
            "num_tokens": 4,
            "segments": [[0, 2, 3], [2, 3, -1], [3, 4, 4]],
            "reward": 1.0,
            "finish_reason": "stop",
        }
    ]


def test_long_samples_are_cut_around_the_end_of_the_prompt() -> None:
    tokens = np.arange(100_000, 104_000)
    samples = [
        make_trajectory(tokens.tolist(), budget=4000, max_context_len=8000) for _ in range(20)
    ]
    for sample in samples:
        for version in range(4):
            part = tokens[1000 * version : 1000 * (version + 1)].tolist()
            sample.append_generated(*arrays(part), version)
        sample.reward = 0.0

    found = worst_and_best([Group("eval", samples)])

    assert len(found) == 6
    assert found[0]["prompt_tokens"] == tokens[-1024:].tolist()
    assert found[0]["tokens"] == tokens[:1024].tolist()
    assert found[0]["segments"] == [[0, 1000, 0], [1000, 1024, 1]]
    assert (found[0]["num_prompt_tokens"], found[0]["num_tokens"]) == (4000, 4000)
    assert len(msgpack.packb(found)) < 64 * 1024


def one_each(only_a: int, only_b: int, equal: int) -> NDArray[np.int64]:
    """B's right samples minus A's, of one sample of each prompt."""
    return np.asarray([-1] * only_a + [1] * only_b + [0] * equal)


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

    assert mean_interval(shares, 1) == pytest.approx(published, abs=5e-5)


def test_several_samples_a_prompt_are_clustered() -> None:
    """By hand: the shares 0, 0.5, 0.5, 0.75 have a mean of 0.4375, squared deviations that add up
    to 0.296875, and so a standard error of (0.296875 / 3 / 4) ** 0.5 = 0.157288."""
    found = mean_interval(np.asarray([0.0, 0.5, 0.5, 0.75]), 4)

    assert found == pytest.approx((0.4375 - 0.308279, 0.4375 + 0.308279), abs=1e-6)


@pytest.mark.parametrize(
    ("only_a", "only_b", "expected"), [(1, 7, 0.0703), (6, 16, 0.0525), (0, 0, 1.0), (3, 3, 1.0)]
)
def test_one_sample_a_prompt_has_mcnemars_exact_test(
    only_a: int, only_b: int, expected: float
) -> None:
    """The first is the example of Fagerland, Lydersen and Laake, BMC Medical Research Methodology
    2013, 13:91, which is 2 * (1 + 8) / 2**8; the second is 2 * 110056 / 2**22, and 110056 the
    number of ways to choose up to 6 out of 22."""
    assert compare_pairs(one_each(only_a, only_b, 50), 1)[0] == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    "gained", [[3, -1, 2, 0, 4, 1, -2, 2], [-9, 9, 9, -8, 1, 5, 5, -7, 2, 0, 6], [7], [0, 0]]
)
def test_several_samples_a_prompt_have_the_share_of_flips_with_as_large_a_sum(
    gained: list[int],
) -> None:
    sums = [sum(flip) for flip in product(*((step, -step) for step in gained))]

    share = sum(abs(total) >= abs(sum(gained)) for total in sums) / len(sums)

    assert compare_pairs(np.asarray(gained), 9)[0] == pytest.approx(share, rel=1e-12)
    assert compare_pairs(-np.asarray(gained), 9)[0] == pytest.approx(share, rel=1e-12)


def test_many_prompts_of_many_samples_come_near_the_normal_distribution() -> None:
    gained = np.random.default_rng(0).integers(-8, 9, 14_000)

    expected = math.erfc((abs(gained.sum()) - 1) / math.sqrt(2 * (gained**2).sum()))

    assert compare_pairs(gained, 9)[0] == pytest.approx(expected, rel=1e-3)


def test_of_many_prompts_the_smallest_chances_are_right() -> None:
    assert compare_pairs(np.ones(1000, np.int64), 9)[0] == pytest.approx(2.0**-999)


@pytest.mark.parametrize(
    ("only_a", "only_b", "limits"), [(5, 0, (0.0, 0.5218)), (7, 3, (0.0667, 0.6525))]
)
def test_one_sample_a_prompt_has_the_interval_of_clopper_and_pearson(
    only_a: int, only_b: int, limits: tuple[float, float]
) -> None:
    """By hand for 41 prompts; `limits` are the published ones of B's share of those that differ."""
    num = only_a + only_b
    differing = np.asarray([1.0] * num + [0.0] * (41 - num))
    mean, (_, most) = num / 41, mean_interval(differing, 1)
    share, low, high = (2 * part - 1 for part in (only_b / num, *limits))
    below = math.hypot(mean * (share - low), low * (most - mean))
    above = math.hypot(mean * (high - share), high * (most - mean))

    _, found = compare_pairs(one_each(only_a, only_b, 41 - num), 1)

    assert found == pytest.approx((mean * share - below, mean * share + above), abs=1e-4)


def test_the_interval_excludes_0_where_the_test_rejects() -> None:
    rng = np.random.default_rng(5)
    compared = [(one_each(a, b, 100 - a - b), 1) for a in range(11) for b in range(11)]
    compared += [(rng.integers(-8, 9, 20) + shift, 16) for shift in range(6) for _ in range(10)]
    rejected = 0
    for gained, num_each in compared:
        p, (low, high) = compare_pairs(gained, num_each)

        assert (low > 0 or high < 0) == (p < 0.05)
        assert low <= gained.mean() / num_each <= high
        rejected += p < 0.05
    assert 20 < rejected < len(compared) - 20


def test_several_samples_a_prompt_have_nearly_the_normal_interval_of_differences() -> None:
    gained = np.random.default_rng(3).integers(-8, 9, 2000) + 1
    half = 1.959964 * gained.std(ddof=1) / 8 / 2000**0.5

    _, (low, high) = compare_pairs(gained, 8)

    mean = gained.mean() / 8
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.05 * half)


def test_limits_are_found_where_chances_at_equal_quality_are_below_the_smallest_number() -> None:
    p, (low, high) = compare_pairs(one_each(3, 1197, 119), 1)

    assert p == 0.0
    assert 0.88 < low < 1194 / 1319 < high < 0.93


@pytest.mark.parametrize(
    ("gained", "num_each"), [([64] * 6, 64), ([1] * 50_000, 1), ([2, 1], 2), ([8, 8, 0], 8)]
)
def test_where_all_differences_favor_one_model_the_interval_is_that_of_the_other_mirrored(
    gained: list[int], num_each: int
) -> None:
    p, (low, high) = compare_pairs(np.asarray(gained), num_each)
    swapped = compare_pairs(-np.asarray(gained), num_each)

    assert swapped == (p, pytest.approx((-high, -low), abs=1e-7))
    assert (low > 0) == (p < 0.05)
    assert low < np.mean(gained) / num_each <= high <= 1


@pytest.mark.parametrize(("num", "num_each"), [(6, 64), (50_000, 1)])
def test_the_limit_of_equal_differences_is_where_all_favor_b_with_a_chance_of_1_in_40(
    num: int, num_each: int
) -> None:
    limit, (least, _) = 2 * 0.025 ** (1 / num) - 1, mean_interval(np.ones(num), 1)

    _, (low, _) = compare_pairs(np.full(num, num_each), num_each)

    assert low == pytest.approx(1 - math.hypot(1 - limit, limit * (1 - least)), abs=1e-7)


def test_equal_results_have_an_interval_with_a_width() -> None:
    _, (low, high) = compare_pairs(np.zeros(20, np.int64), 4)

    assert high == -low == pytest.approx(1 - mean_interval(np.ones(20), 1)[0])
