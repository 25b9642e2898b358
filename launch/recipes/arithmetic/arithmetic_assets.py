"""The recipe's model and data sets, made once in the user's cache; prints their folder.

    python launch/recipes/arithmetic/arithmetic_assets.py

```
~/.cache/umbra/smollm2-5/
    model/        SmolLM2-135M-Instruct for transformers: config, weights, tokenizer, chat template
    sums/         train.jsonl, eval.jsonl: {"messages": [...], "answer": ...}; worked.jsonl: chats
                  whose answers show the work, for SFT
    boxed/        the same problems, to be answered as \\boxed{number}
```

Needs what `make smollm2` installs (requirements.txt). `$XDG_CACHE_HOME` replaces `~/.cache`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 5
"""Raise it with every change of what is made: folders of other formats stay and are not read."""
NUM_TRAIN: Final = 16384
NUM_EVAL: Final = 512
NUM_WORKED: Final = 2048
EVAL_SEED, TRAIN_SEED = 0, 1_000_000
"""Item i of seed s is that of seed s + i, so these are further apart than the sets are long."""
SUMS: Final = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Settings of reasoning-gym's generator `chain_sum`."""
TASKS: Final = {"sums": "", "boxed": "\nWrite the answer as \\boxed{number}."}
"""Folder -> what each question ends with."""


def assets_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "umbra" / f"smollm2-{FORMAT}"


def ensure_assets(folder: Path) -> None:
    """Makes the folder unless it is there: beside it, so an interrupted call leaves nothing."""
    if folder.exists():
        return
    from smollm2_model import packaged_gguf, write_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        made = Path(work) / "made"
        write_model(packaged_gguf(), made / "model")
        for task in TASKS:
            write_data(task, made / task)
        write_worked(made / "sums")
        try:
            made.rename(folder)
        except OSError:  # another call was faster
            if not folder.exists():
                raise


def write_data(task: str, folder: Path) -> None:
    """The questions of eval.jsonl differ, and none of them is in train.jsonl, where some repeat."""
    folder.mkdir(parents=True)
    held_out: dict[str, dict[str, Any]] = {}
    items = draw(task, EVAL_SEED, NUM_TRAIN)
    while len(held_out) < NUM_EVAL:
        row = next(items)
        held_out[row["messages"][-1]["content"]] = row
    _write_rows(folder / "eval.jsonl", list(held_out.values()))
    training = (
        row
        for row in draw(task, TRAIN_SEED, 2 * NUM_TRAIN)
        if row["messages"][-1]["content"] not in held_out
    )
    _write_rows(folder / "train.jsonl", [next(training) for _ in range(NUM_TRAIN)])


def write_worked(folder: Path) -> None:
    """The first training problems, each with an answer in two steps."""
    with (folder / "train.jsonl").open() as lines:
        rows = [json.loads(next(lines)) for _ in range(NUM_WORKED)]
    _write_rows(folder / "worked.jsonl", [{"messages": with_work(row)} for row in rows])


def with_work(row: dict[str, Any]) -> list[dict[str, str]]:
    """The tens come first: "84 - 12 = 84 - 10 - 2 = 74 - 2 = 72"."""
    (question,) = row["messages"]
    first, sign, second, _ = question["content"].split()[-4:]
    tens, ones = int(second) // 10 * 10, int(second) % 10
    between = int(first) + (tens if sign == "+" else -tens)
    steps = [f"{first} {sign} {tens} {sign} {ones}", f"{between} {sign} {ones}", row["answer"]]
    text = " = ".join([f"{first} {sign} {second}", *steps])
    return [question, {"role": "assistant", "content": text}]


def draw(task: str, seed: int, size: int) -> Generator[dict[str, Any]]:
    import reasoning_gym

    for item in reasoning_gym.create_dataset("chain_sum", seed=seed, size=size, **SUMS):
        message = {"role": "user", "content": item["question"] + TASKS[task]}
        yield {"messages": [message], "answer": item["answer"]}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    ensure_assets(assets_folder())
    print(assets_folder())
