"""What a trajectory is made of: deltas of engines, and tokens that others give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import arrays, make_trajectory

from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import ProtocolError, RequestRefused, RolloutError
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED


def test_runs_keep_their_tokens_logprobs_and_versions() -> None:
    sample = make_trajectory(prompt=[1, 2, 3])

    sample.cut()
    assert sample.num_refilled_tokens == 0
    sample.append_generated(*arrays([10, 11], -0.5), 4)
    sample.cut()
    sample.append_generated(*arrays([12], -0.25), 5)

    assert sample.context().tolist() == [1, 2, 3, 10, 11, 12]
    assert sample.logprobs.tolist() == [-0.5, -0.5, -0.25]
    assert sample.versions.tolist() == [4, 4, 5]
    assert sample.segments() == [Segment(0, 2, 4), Segment(2, 3, 5)]
    assert sample.num_interruptions == 2
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


@pytest.mark.parametrize("tokens", [[], [0, 63], (1, 2), np.asarray([5], np.int64), range(3)])
def test_tokens_of_the_vocabulary_are_taken(tokens: Any) -> None:
    assert token_ids(tokens, 64).tolist() == list(tokens)
    assert token_ids(tokens, 64).dtype == np.int32


def test_what_is_right_already_is_not_copied() -> None:
    tokens = np.asarray([1, 2], np.int32)

    assert token_ids(tokens, 64) is tokens


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "said"),
    [
        ([1, 64, 65], 64, r"token 64 at index 1 is outside the model's vocabulary of 64 \(0 to 63"),
        ([1, 2, -1], 64, "token -1 at index 2 is outside the model's vocabulary of 64"),
        ([-1], 0, "token -1 at index 0 is not a token id"),
        ([0, 1 << 31], 0, "token 2147483648 at index 1 is not a token id"),
        ([0, 1 << 70], 64, f"token {1 << 70} at index 1 is outside"),
        ([0, -(1 << 70)], 0, f"token -{1 << 70} at index 1 is not a token id"),
        (np.asarray([3, 64], np.uint64), 64, "token 64 at index 1"),
        ([1.5], 64, "expected a 1-D sequence of integer token ids"),
        ([True], 64, "expected a 1-D sequence of integer token ids, got a list of bool"),
        (b"ab", 0, "expected a 1-D sequence of integer token ids, got a bytes"),
        ("", 0, "expected a 1-D sequence of integer token ids, got a str"),
        (memoryview(b"ab"), 0, "expected a 1-D sequence of integer token ids, got a memoryview"),
        (None, 0, "expected a 1-D sequence of integer token ids, got a NoneType"),
        (["a"], 64, "expected a 1-D sequence of integer token ids"),
        ([[1]], 64, "expected a 1-D sequence of integer token ids"),
        (np.zeros(2, np.float32), 64, "expected a 1-D sequence of integer token ids"),
        (np.zeros((1, 2), np.int32), 64, "expected a 1-D sequence of integer token ids"),
    ],
)
def test_other_tokens_are_refused_by_name(tokens: Any, vocab_size: int, said: str) -> None:
    with pytest.raises(RequestRefused, match=f"^given: {said}"):
        token_ids(tokens, vocab_size, "given")


ITEM: dict[str, Any] = {
    "ids": np.asarray([1], np.int64),
    "positions": np.zeros(1, np.int32),
    "offsets": np.asarray([0, 2], np.int32),
    "tokens": np.zeros(2, np.int32),
    "logprobs": np.zeros(2, np.float32),
    "versions": np.zeros(1, np.int64),
    "finished_ids": np.zeros(0, np.int64),
    "finish_reasons": [],
}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("ids", None, "ids is missing"),
        ("tokens", np.zeros(2, np.int64), "tokens must be 1-d int32"),
        ("positions", np.zeros(2, np.int32), "positions: 2 values, not 1"),
        ("offsets", np.asarray([0, 3], np.int32), "do not cut 2 tokens"),
        ("offsets", np.asarray([0], np.int32), "offsets: 1 values, not 2"),
        ("versions", np.asarray([-1], np.int64), "negative version"),
        ("logprobs", np.asarray([np.nan, 0], np.float32), "not finite"),
        ("finish_reasons", ["stop"], "finished_ids: 0 values, not 1"),
        ("finish_reasons", [7], "must be a list of texts"),
    ],
)
def test_a_malformed_batch_is_refused(column: str, value: object, message: str) -> None:
    DeltaBatch.from_wire(ITEM)

    with pytest.raises(ProtocolError, match=message):
        DeltaBatch.from_wire({**ITEM, column: value})


def test_offsets_whose_differences_overflow_are_refused() -> None:
    batch = ITEM | {
        "ids": np.arange(3),
        "positions": np.zeros(3, np.int32),
        "versions": np.zeros(3, np.int64),
        "offsets": np.asarray([0, 2**31 - 1, -2, 2], np.int32),
    }

    with pytest.raises(ProtocolError, match="do not cut 2 tokens"):
        DeltaBatch.from_wire(batch)


@pytest.mark.parametrize("item", [None, [], "text", np.zeros(3)])
def test_a_batch_that_is_no_map_is_refused(item: object) -> None:
    with pytest.raises(ProtocolError, match="must be a map"):
        DeltaBatch.from_wire(item)
