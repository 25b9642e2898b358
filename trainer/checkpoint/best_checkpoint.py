"""The link to the checkpoint whose evaluation was best: `train.keep_best_by`. Torch-free."""

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
    """Points the link `best`, beside the checkpoints, at the best one. Rank 0 has one.

    A link to a step that a resumed run will repeat is removed: that checkpoint is of a history that
    was discarded.

    Args:
        folder: of the checkpoints.
        by: the score of an evaluation that is compared.
        rows: what metrics.jsonl has of the run so far; the score of the linked checkpoint is there.
        step: steps done so far.
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
        """Returns whether the evaluation of a checkpoint is the best so far; then the link is
        changed. The weights at the start have no checkpoint and do not count.

        Args:
            checkpoint: its folder has the link, also after the run directory was moved.
            row: the metrics of the evaluation.
        """
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
    """The checkpoint that the link points at; None without a link."""
    link = folder / _LINK
    return folder / link.readlink() if link.is_symlink() else None
