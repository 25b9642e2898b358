"""Samples are decoded as one text and cut into turns, whatever bytes their tokens hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
from byte_tokenizer import END, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.rollout.agents.sample_text import SampleText
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.text.model_tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def token_of_byte(tokenizer: ModelTokenizer) -> list[int]:
    """Tokens of all bytes that occur in UTF-8; bytes that never do have one that does."""
    tokens = [0] * 256
    for code in [*range(0x800), *range(0x800, 0x110000, 0x400)]:
        if not 0xD800 <= code < 0xE000:
            for byte, token in zip(chr(code).encode(), tokenizer.encode(chr(code)), strict=True):
                tokens[byte] = token
    return tokens


def test_turns_have_their_versions_and_special_tokens_are_visible(
    tokenizer: ModelTokenizer,
) -> None:
    parts = ["2+2=", "fo", f"ur{END}", "wrong", "4", END]
    segments: list[Segment] = []
    tokens: list[int] = []
    for part, version in zip(parts[1:], (3, 4, -1, 4, 5), strict=True):
        tokens += tokenizer.encode(part)
        segments.append(Segment(segments[-1].stop if segments else 0, len(tokens), version))

    text = SampleText.decode(tokenizer.decode_all, tokenizer.encode(parts[0]), tokens, segments)

    assert text.prompt == "2+2="
    assert [(turn.versions, turn.text) for turn in text.turns] == [
        ((3, 4), "four<eos>"),
        ((), "wrong"),
        ((4, 5), "4<eos>"),
    ]
    assert [(turn.start, turn.stop, turn.is_given) for turn in text.turns] == [
        (0, 5, False), (5, 10, True), (10, 12, False)
    ]  # fmt: skip


def test_a_character_that_is_split_between_turns_belongs_to_the_later_one(
    tokenizer: ModelTokenizer,
) -> None:
    tokens = tokenizer.encode("a🦉b")
    segments = [Segment(0, 3, 1), Segment(3, 6, -1)]

    text = SampleText.decode(tokenizer.decode_all, [], tokens, segments)

    assert [turn.text for turn in text.turns] == ["a", "🦉b"]


def test_a_sample_without_tokens_is_its_prompt(tokenizer: ModelTokenizer) -> None:
    assert SampleText.decode(tokenizer.decode_all, tokenizer.encode("é"), [], []) == SampleText(
        "é", ()
    )


@given(
    data=st.binary(max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=5),
    num_prompt=st.integers(0, 24),
)
def test_no_cut_changes_the_text(
    tokenizer: ModelTokenizer,
    token_of_byte: list[int],
    data: bytes,
    cuts: list[int],
    num_prompt: int,
) -> None:
    tokens = [token_of_byte[byte] for byte in data]
    prompt, completion = tokens[:num_prompt], tokens[num_prompt:]
    bounds = sorted({0, *(min(cut, len(completion)) for cut in cuts), len(completion)})
    segments = [
        Segment(start, stop, idx if idx % 3 else -1)
        for idx, (start, stop) in enumerate(pairwise(bounds))
    ]

    text = SampleText.decode(tokenizer.decode_all, prompt, completion, segments)

    joined = text.prompt + "".join(turn.text for turn in text.turns)
    assert joined == tokenizer.decode_all(tokens)
