"""Saves a tokenizer of the library `tokenizers` as a run does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbra.runtime.text.model_tokenizer import ModelTokenizer, TokenizerState


def save_rust_tokenizer(
    path: Path, tokenizer: Any, end_token_ids: Sequence[int] = (), chat_template: str = ""
) -> None:
    """Writes what `ModelTokenizer.open` opens without transformers."""
    added = tokenizer.get_added_tokens_decoder()
    state = TokenizerState(
        model_path="",
        trust_remote_code=False,
        tokenizer=tokenizer.to_str(),
        splits_special_tokens=False,
        chat_template=chat_template,
        special_tokens={},
        eos_token_id=None,
        pad_token_id=None,
        end_token_ids=end_token_ids,
        special_token_ids=[idx for idx, token in added.items() if token.special],
    )
    ModelTokenizer.of_state(state).save(path)
