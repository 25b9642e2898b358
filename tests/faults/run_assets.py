"""The assets of runs that are to fail: a model of 20 k parameters, its tokenizer, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NUM_PROMPTS = 32


def write_assets(folder: Path) -> None:
    """Writes `folder`/model and `folder`/train.jsonl with NUM_PROMPTS rows (prompt, answer)."""
    from umbra.trainer.quickstart.quickstart_model import TOKEN_IDS, VOCABULARY, write_tokenizer

    model_dir = folder / "model"
    model_dir.mkdir(parents=True)
    write_tokenizer(model_dir)
    _write_model(model_dir, len(VOCABULARY), TOKEN_IDS["<eos>"])
    rows = [{"prompt": f"all {idx:05d}=", "answer": str(idx)} for idx in range(NUM_PROMPTS)]
    write_rows(folder / "train.jsonl", rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_model(folder: Path, vocab_size: int, eos_token_id: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    hide_progress: Any = disable_progress_bar  # untyped
    hide_progress()
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(str(folder))
