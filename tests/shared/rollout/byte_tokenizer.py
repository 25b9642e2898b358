"""A tokenizer with one token per byte, so that characters are split over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saved_tokenizer import save_rust_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path

END = "<eos>"


def byte_tokenizer(run_dir: Path) -> ModelTokenizer:
    """Writes the tokenizer of a run's policy and opens it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    path = tokenizer_path(run_dir)
    save_rust_tokenizer(path, tokenizer)
    return ModelTokenizer.open(path)
