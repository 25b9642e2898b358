from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import arrays, make_trajectory

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED


def test_runs_keep_their_tokens_logprobs_and_versions() -> None:
    sample = make_trajectory(prompt=[1, 2, 3])

    sample.append_generated(*arrays([10, 11], -0.5), 4)
    sample.cut()
    sample.append_generated(*arrays([12], -0.25), 5)

    assert sample.context().tolist() == [1, 2, 3, 10, 11, 12]
    assert sample.logprobs.tolist() == [-0.5, -0.5, -0.25]
    assert sample.versions.tolist() == [4, 4, 5]
    assert sample.segments() == [Segment(0, 2, 4), Segment(2, 3, 5)]
    assert sample.num_interruptions == 1
    assert sample.num_refilled_tokens == 5


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=30))
def test_growing_by_runs_equals_growing_a_list(runs: list[tuple[int, int]]) -> None:
    sample = make_trajectory(prompt=[1], budget=10_000, max_context_len=20_000)
    model: list[tuple[int, int]] = []

    for count, version in runs:
        tokens = list(range(len(model), len(model) + count))
        sample.append_generated(*arrays(tokens), version)
        model += [(token, version) for token in tokens]

    assert list(zip(sample.tokens.tolist(), sample.versions.tolist(), strict=True)) == model
    assert sample.num_generated == len(model)
    covered = [v for seg in sample.segments() for v in [seg.version] * (seg.stop - seg.start)]
    assert covered == [version for _, version in model]


def test_the_budget_is_never_exceeded() -> None:
    sample = make_trajectory(prompt=[1, 2], budget=3)
    sample.append_generated(*arrays([5, 5]), 0)

    assert sample.num_tokens_left() == 1
    with pytest.raises(RolloutError, match="2 tokens, room for 1"):
        sample.append_generated(*arrays([6, 6]), 0)


def test_room_ends_with_the_context() -> None:
    sample = make_trajectory(prompt=[1, 2, 3], budget=100, max_context_len=5)

    assert sample.num_tokens_left() == 2


def test_given_tokens_are_marked_and_do_not_use_up_the_budget() -> None:
    sample = make_trajectory(prompt=[1, 2], budget=4)
    sample.append_generated(*arrays([10, 11], -1.0), 7)

    sample.extend_context(np.asarray([1, 2, 10, 11, 90, 91], np.int32))
    sample.append_generated(*arrays([12], -1.0), 8)

    assert sample.versions.tolist() == [7, 7, NOT_GENERATED, NOT_GENERATED, 8]
    assert sample.logprobs.tolist() == [-1.0, -1.0, 0.0, 0.0, -1.0]
    assert sample.num_generated == 3
    assert sample.num_tokens_left() == 1


@pytest.mark.parametrize(
    ("context", "at"), [([1, 2, 10, 12, 5], 3), ([1, 2, 10], 3), ([1, 3, 10, 11], 1)]
)
def test_a_context_that_leaves_the_trajectory_is_refused(context: list[int], at: int) -> None:
    sample = make_trajectory(prompt=[1, 2])
    sample.append_generated(*arrays([10, 11]), 0)

    with pytest.raises(RolloutError, match=f"at position {at} of 4: append"):
        sample.extend_context(np.asarray(context, np.int32))
