"""The limit in bytes of a prompt of so many tokens never refuses a prompt that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from umbra.runtime.text.model_tokenizer import ModelTokenizer

CORPUS = [
    "the thing that there is",
    "  " * 40,
    "é è ê " * 20,
    "日本語 テキスト " * 9,
    "-" * 90,
    "😀" * 30,
]


def byte_level() -> Any:
    """A tokenizer like that of Qwen and Llama 3."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_byte_fallback() -> Any:
    """A tokenizer like that of Llama 2, Mistral and Gemma: a space is three bytes long."""
    pieces = [
        "▁",
        "t",
        "h",
        "e",
        "th",
        "the",
        "▁the",
        "é",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocab = {piece: idx for idx, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer: Any = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def with_unknown_characters() -> Any:
    tokenizer: Any = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, with_byte_fallback, with_unknown_characters])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    (folder / "config.json").write_text("{}")
    return ModelTokenizer.open(folder)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=40)
    | st.lists(st.sampled_from([*CORPUS, " ", "-", "e\u0301", "각"]), max_size=6).map("".join)
)
def test_no_prompt_has_more_bytes_than_its_tokens_may_stand_for(
    tokenizer: ModelTokenizer, text: str
) -> None:
    num_tokens = len(tokenizer.encode(text))

    assert len(text.encode()) <= num_tokens * tokenizer.max_token_nbytes
