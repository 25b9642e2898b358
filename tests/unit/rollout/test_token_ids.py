"""Checks of callers' tokens: errors name the token, its index and the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.errors import RequestRefused


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
