"""Tokens of the echo engine follow from all that was before them, and from nothing else."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from umbra.engines.echo.echo_engine import EchoTokens, echo_logprobs

VOCAB_SIZE = 50_000
CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6]
LENGTH = 300
PROGRAM = """
from umbra.engines.echo.echo_engine import EchoTokens
drawn = EchoTokens(7, [3, 1, 4, 1, 5, 9, 2, 6], vocab_size=50_000).draw(300)
print(drawn.tokens.tolist(), drawn.keys.tolist())
"""


def tokens_of(seed: int, context: list[int], position: int = 0) -> EchoTokens:
    return EchoTokens(seed, context, vocab_size=VOCAB_SIZE, position=position)


@pytest.mark.parametrize("cut", [1, 2, 17, LENGTH - 1])
def test_a_cut_trajectory_continues_with_the_same_tokens_from_its_context(cut: int) -> None:
    whole = tokens_of(7, CONTEXT).draw(LENGTH)

    rest = tokens_of(7, [*CONTEXT, *whole.tokens[:cut].tolist()], position=cut).draw(LENGTH - cut)

    assert rest.tokens.tolist() == whole.tokens[cut:].tolist()
    assert rest.keys.tolist() == whole.keys[cut:].tolist()


@pytest.mark.parametrize(
    "other",
    [
        (8, CONTEXT, 0),
        (7, CONTEXT, 1),
        (7, CONTEXT[1:], 0),
        (7, [0, *CONTEXT], 0),
        (7, [*CONTEXT[:-2], 6, 2], 0),
        (7, [2, *CONTEXT[1:]], 0),
    ],
    ids=["seed", "position", "a token less", "a token more", "order", "first token"],
)
def test_another_seed_context_or_position_makes_other_tokens_and_logprobs(
    other: tuple[int, list[int], int],
) -> None:
    tokens, keys = tokens_of(7, CONTEXT).draw(LENGTH)

    other_tokens, other_keys = tokens_of(*other).draw(LENGTH)

    assert np.count_nonzero(tokens == other_tokens) < 3
    assert not set(echo_logprobs(keys, 5).tolist()) & set(echo_logprobs(other_keys, 5).tolist())


def test_each_token_has_a_logprob_of_its_own() -> None:
    drawn = EchoTokens(7, CONTEXT, vocab_size=2).draw(LENGTH)  # the same token, again and again

    logprobs = echo_logprobs(drawn.keys, 5)

    assert len(set(logprobs.tolist())) == LENGTH
    assert np.isfinite(logprobs).all()
    assert logprobs.max() < 0


def test_a_drawing_ends_with_a_stop_token() -> None:
    tokens = tokens_of(7, CONTEXT).draw(LENGTH).tokens.tolist()
    cut = tokens_of(7, CONTEXT)

    assert cut.draw(LENGTH, [tokens[20], tokens[40]]).tokens.tolist() == tokens[:21]
    assert cut.position == 21
    assert cut.draw(5).tokens.tolist() == tokens[21:26]


def test_small_vocabularies_are_used_whole_and_evenly() -> None:
    counts = np.bincount(EchoTokens(7, CONTEXT, vocab_size=8).draw(8000).tokens, minlength=8)

    assert len(counts) == 8
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.process
def test_another_process_makes_the_same_tokens() -> None:
    drawn = tokens_of(7, CONTEXT).draw(LENGTH)

    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30.0, check=True
    ).stdout

    assert printed == f"{drawn.tokens.tolist()} {drawn.keys.tolist()}\n"
