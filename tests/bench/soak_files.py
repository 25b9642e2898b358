"""The files of a run directory besides its ledger: `python soak_files.py RUN_DIR NUM_STEPS`."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from soak_manager import NUM_PROMPTS, NUM_WORDS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from umbra.runtime.reports.run_metrics import PANELS
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.text.model_tokenizer import ModelTokenizer, TokenizerState, tokenizer_path


def write_tokenizer(run_dir: Path) -> None:
    words = {f"w{idx} ": idx for idx in range(NUM_WORDS)}
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


def main(run_dir: Path, num_steps: int) -> None:
    write_tokenizer(run_dir)
    settings = {"model": {"path": "."}, "train": {"steps": 10**6}, "run": {"name": "bench"}}
    recorded = json.dumps({"folder": str(run_dir), "settings": settings})
    (run_dir / "settings.json").write_text(recorded)
    tokens = np.asarray([1, 2], "<i4").tobytes()
    record: dict[str, Any] = {"prompt": "w1 w2", "tokens": tokens, "row": {}}
    prompts = ({**record, "id": f"prompt{idx}"} for idx in range(NUM_PROMPTS))
    write_prompts(run_dir / "prompts.msgpack", list(prompts))
    names = [name for panel in PANELS for name in (*panel.series, panel.only_with) if name]
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row = {name: random.random() for name in names}
            print(
                json.dumps(row | {"step": step, "time": time.time(), "time/step_s": 10.0}),
                file=file,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
