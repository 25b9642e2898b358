from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from umbra.trainer.checkpoint.trainer_state import is_complete, read_trainer_state
from umbra.trainer.world.run_files import writing

_LINK: Final = "best"
_COLUMNS: Final[Mapping[str, str]] = {"accuracy": "eval/accuracy", "reward": "eval/reward_mean"}


class BestCheckpoint:
    """Points the link `best`, beside the checkpoints, at the one whose evaluation was best:
    `train.keep_best_by`. Rank 0 has one.

    `rows`, the run's metrics.jsonl so far, have the linked checkpoint's score. A link to a step
    that a resumed run will repeat is removed: that checkpoint is of a history that was discarded.
    """

    def __init__(
        self,
        folder: Path,
        by: Literal["accuracy", "reward"],
        rows: Sequence[Mapping[str, float]],
        step: int,
    ) -> None:
        self._column = _COLUMNS[by]
        self._score = float("-inf")
        link = folder / _LINK
        if not link.is_symlink():
            return
        if is_complete(link) and (best := read_trainer_state(link).step) <= step:
            scores = [
                row[self._column] for row in rows if row["step"] == best and self._column in row
            ]
            self._score = scores[-1] if scores else self._score
        else:
            with writing("clear", link):
                link.unlink()

    def evaluated(self, checkpoint: Path, row: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint's evaluation, with the metrics `row`, is the best so far;
        then the link is changed, in the checkpoint's folder, wherever the run directory was moved.
        The weights at the start have no checkpoint and do not count."""
        score = row[self._column]
        if score <= self._score or not is_complete(checkpoint):
            return False
        self._score = score
        link, new = checkpoint.with_name(_LINK), checkpoint.with_name(f".{_LINK}")
        with writing("change", link):
            new.unlink(missing_ok=True)
            new.symlink_to(checkpoint.name)
            os.replace(new, link)
        return True


def best_checkpoint(folder: Path) -> Path | None:
    """None without a link."""
    link = folder / _LINK
    return folder / link.readlink() if link.is_symlink() else None
