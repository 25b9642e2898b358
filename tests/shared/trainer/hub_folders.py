"""What a `LocalHub` serves in tests: one small model, and one data set of two splits."""

from __future__ import annotations

import json
from pathlib import Path

MODEL, DATA = "acme/tiny", "acme/sums"
_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""


def write_data_set(hub: Path) -> Path:
    """DATA, with 8 rows (question, answer) to train on and 3 held-out ones."""
    folder = hub / "datasets" / DATA
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(_CARD)
    for split, first, num in (("train", 0, 8), ("test", 8, 3)):
        rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(first, first + num)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "main" / f"{split}.jsonl").write_text(text)
    return folder
