"""The files of a run directory besides its ledger, for benchmarks of what reads it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from umbra.runtime.reports.run_metrics import PANELS
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.text.model_tokenizer import ModelTokenizer, TokenizerState, tokenizer_path


def write_run_files(run_dir: Path, prompt_ids: Iterable[str], *, num_words: int) -> None:
    """Writes settings, a tokenizer of so many words, and prompts."""
    words = {f"w{idx} ": idx for idx in range(num_words)}
    tokenizer: Any = Tokenizer(WordLevel(words, unk_token="w0 "))
    state = TokenizerState(
        model_path=".",
        trust_remote_code=False,
        tokenizer=tokenizer.to_str(),
        splits_special_tokens=False,
        chat_template="",
        special_tokens={},
        eos_token_id=None,
        pad_token_id=None,
        end_token_ids=[],
        special_token_ids=[],
    )
    ModelTokenizer.of_state(state).save(tokenizer_path(run_dir))
    settings = {"model": {"path": "."}, "train": {"steps": 10**6}, "run": {"name": "bench"}}
    (run_dir / "settings.json").write_text(
        json.dumps({"folder": str(run_dir), "settings": settings})
    )
    record: dict[str, Any] = {
        "prompt": "w1 w2",
        "tokens": np.asarray([1, 2], "<i4").tobytes(),
        "row": {},
    }
    write_prompts(run_dir / "prompts.msgpack", [{**record, "id": name} for name in prompt_ids])


def metrics_of_a_step(step: int) -> dict[str, float]:
    names = [name for panel in PANELS for name in (*panel.series, panel.only_with) if name]
    values = {name: random.random() for name in names}
    return values | {"step": step, "time": time.time(), "time/step_s": 10.0}
