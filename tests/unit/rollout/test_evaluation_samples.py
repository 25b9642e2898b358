"""The samples of an evaluation that ranks get: a few, and of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import numpy as np
from rollout_samples import arrays, make_trajectory

from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.manager.evaluation import worst_and_best


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
