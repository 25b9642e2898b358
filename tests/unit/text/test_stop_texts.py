"""Stop texts in runs of tokens, against looking at every prefix of the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.text.stop_texts import StopTexts

STOPS = ["</a>", "ab", "é!"]


def decode_bytes(tokens: Sequence[int]) -> str:
    """A token a byte, so that characters are split over tokens."""
    return bytes(tokens).decode(errors="replace")


BYTES = StopTexts(decode_bytes, STOPS, 256)


def decode_words(tokens: Sequence[int]) -> str:
    """Like tokenizers that drop the space in front of the first word."""
    words = [" x", " END", "E", "N", "D", " "]
    return "".join(words[token] for token in tokens).removeprefix(" ")


def naively(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], stops: Sequence[str]
) -> int:
    ends = (n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops))
    return next(ends, 0)


def found_in_runs(stops: StopTexts, tokens: Sequence[int], places: Sequence[int]) -> int:
    """As the dispatcher does: runs without a token that could complete a stop are not looked at."""
    known = np.asarray(tokens, np.int32)
    bounds = sorted({0, len(tokens), *(place % (len(tokens) + 1) for place in places)})
    for start, stop in pairwise(bounds):
        if not stops.may_complete(known[start:stop]).any():
            continue
        if num := stops.num_until_stop(known[:start], known[start:stop]):
            return start + num
    return 0


@given(st.text("abé!</> 😀", max_size=40), st.lists(st.integers(0, 1000), max_size=20))
def test_the_first_token_that_completes_a_stop_ends_the_text(text: str, places: list[int]) -> None:
    tokens = list(text.encode())

    found = found_in_runs(BYTES, tokens, places)

    assert found == naively(decode_bytes, tokens, STOPS)


@pytest.mark.parametrize("stops", [[" END"], ["D "], ["END x", "EE"]])
@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 1000), max_size=9))
def test_a_space_that_is_not_shown_in_front_of_the_text_counts_within_it(
    stops: list[str], tokens: list[int], places: list[int]
) -> None:
    found = found_in_runs(StopTexts(decode_words, stops, 6), tokens, places)

    assert found == naively(decode_words, tokens, stops)


@pytest.mark.parametrize("cut", range(1, 7))
def test_half_a_character_behind_a_stop_does_not_hide_it(cut: int) -> None:
    tokens = list("x</a>😀".encode())

    assert found_in_runs(BYTES, tokens, [cut]) == 5


def test_a_long_text_is_decoded_a_few_times_only() -> None:
    num_decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return decode_bytes(tokens)

    stops = StopTexts(decode, ["</a>"], 256)
    tokens = list(b"x" * 4095 + b"</a>")
    num_decoded = 0
    assert found_in_runs(stops, tokens, []) == 4099
    assert num_decoded < 20 * 4099

    num_decoded = 0
    assert found_in_runs(stops, tokens, range(4100)) == 4099
    assert num_decoded < 200
