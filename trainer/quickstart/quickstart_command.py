from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from umbra.runtime.disk import explain, os_error_behind
from umbra.trainer.quickstart.quickstart_task import Task, draw_tasks
from umbra.trainer.reporting.console import ProgressDisplay

NUM_TRAIN: Final = 8192
NUM_EVAL: Final = 256
MARKER: Final = "fingerprint"


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the files if they are missing or out of date, and prints what it did."""
    parser = argparse.ArgumentParser(
        prog="python -m umbra.trainer.quickstart",
        description="Make the quickstart's model, tokenizer and data sets (once).",
    )
    parser.add_argument("out_dir", type=Path, help="folder to make them in")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up")
    arguments = parser.parse_args(argv)
    display = ProgressDisplay(sys.stderr)
    try:
        with display, display.activity("making the quickstart's model and data sets"):
            is_made = ensure_assets(arguments.out_dir, arguments.seed)
    except Exception as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        reason = explain(cause, arguments.out_dir, or_else=", or give another folder")
        raise SystemExit(f"quickstart: cannot write {arguments.out_dir}: {reason}") from error
    if is_made:
        print(f"quickstart: made model and data sets in {arguments.out_dir}")
    else:
        print(f"quickstart: model and data sets in {arguments.out_dir} are up to date")


def ensure_assets(out_dir: Path, seed: int) -> bool:
    """Makes the files unless those of this seed and program exist; returns whether it made any. A
    new folder beside `out_dir` takes its name at the end, so an interrupted call leaves the old
    files or none. If two calls run at once, the later one's files stay.

        OUT_DIR/model/        config.json, model.safetensors, tokenizer.json, ...
        OUT_DIR/train.jsonl   {"prompt": ..., "answer": ...}
        OUT_DIR/eval.jsonl    held out: none of its prompts is in train.jsonl or seen by the warm-up
        OUT_DIR/fingerprint   of the program and seed that made them; written last
    """
    fingerprint = _fingerprint(seed)
    if _read_marker(out_dir) == fingerprint:
        return False
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as work:
        made = Path(work) / "made"
        _make(made, seed)
        (made / MARKER).write_text(fingerprint)
        if out_dir.exists():
            out_dir.rename(Path(work) / "old")
        made.rename(out_dir)
    return True


def _make(folder: Path, seed: int) -> None:
    from umbra.trainer.quickstart.quickstart_model import write_starting_model, write_tokenizer

    tasks = draw_tasks(random.Random(seed), NUM_TRAIN + NUM_EVAL)
    held_out, training = tasks[:NUM_EVAL], tasks[NUM_EVAL:]
    model_dir = folder / "model"
    model_dir.mkdir(parents=True)
    _write_jsonl(folder / "train.jsonl", training)
    _write_jsonl(folder / "eval.jsonl", held_out)
    write_tokenizer(model_dir)
    write_starting_model(model_dir, training, seed)


def _write_jsonl(path: Path, tasks: Sequence[Task]) -> None:
    path.write_text("".join(json.dumps(task.row()) + "\n" for task in tasks))


def _fingerprint(seed: int) -> str:
    """Hash of the seed and of this package's source, which holds every other setting."""
    digest = hashlib.sha256(str(seed).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _read_marker(out_dir: Path) -> str | None:
    try:
        return (out_dir / MARKER).read_text()
    except (OSError, ValueError):
        return None
