"""The part of a checkpoint that is not tensors, and the link to the best one. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from umbra.runtime.disk import explain
from umbra.runtime.errors import ConfigError
from umbra.trainer.world.run_files import RunDirectoryError, writing

STATE_FILE: Final = "trainer.json"
COMPLETE: Final = "COMPLETE"
"""The file that is written last into a checkpoint."""
IF_DAMAGED: Final = "; if the checkpoint is damaged, restore it from a backup, or name another one"
_LINK: Final = "best"
_COLUMNS: Final[Mapping[str, str]] = {"accuracy": "eval/accuracy", "reward": "eval/reward_mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    step: int  # optimizer steps done
    version: int  # of the weights in the checkpoint
    world_size: int  # ranks that wrote it; for information
    seed: int  # `train.seed` of the run, which decides the order of prompts
    ledger: str = ""  # position in the rollouts' ledger, behind all samples trained on
    lora: Mapping[str, Any] = field(default_factory=dict[str, Any])  # `model.lora`, if adapters
    base: str = ""  # and the digest of the weights that they change


def is_complete(checkpoint: Path) -> bool:
    return (checkpoint / COMPLETE).exists()


def checkpoint_step(checkpoint: Path) -> int:
    """N for the name `step-N`, else -1."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest step first."""
    found = [path for path in folder.glob("step-*") if checkpoint_step(path) >= 0]
    return sorted(filter(is_complete, found), key=checkpoint_step)


def check_complete(path: Path) -> None:
    """Raises ConfigError, naming a checkpoint near `path`, if it is not a complete one."""
    if is_complete(path):
        return
    what = "does not exist"
    if path.is_dir():
        is_one = checkpoint_step(path) >= 0
        what = "is incomplete: its save was interrupted" if is_one else "is not a checkpoint"
    folders = (path.parent, path, path / "checkpoints")
    near = [newest for each in folders for newest in complete_checkpoints(each)[-1:]]
    where = f"{near[0].parent}, such as {near[0].name}" if near else "RUN_DIR/checkpoints"
    raise ConfigError(f"checkpoint {path} {what}: name one of the folders in {where}")


def read_trainer_state(path: Path) -> TrainerState:
    """Raises ConfigError if `path` is not a complete checkpoint, RunDirectoryError if the file
    cannot be read or is damaged."""
    check_complete(path)
    with reading_checkpoint(path, STATE_FILE):
        return TrainerState(**json.loads((path / STATE_FILE).read_text()))


@contextmanager
def reading_checkpoint(checkpoint: Path, name: str) -> Generator[None]:
    """Turns any error in reading a file of a checkpoint into one with file name and remedy: damaged
    bytes cause nearly any kind of error in the libraries that parse them."""
    try:
        yield
    except Exception as error:
        cause = describe_cause(error) + IF_DAMAGED
        if isinstance(error, OSError):
            cause = explain(error, checkpoint, otherwise=IF_DAMAGED)
        raise RunDirectoryError(
            f"cannot read {name} of the checkpoint {checkpoint}: {cause}"
        ) from error


def describe_cause(error: BaseException) -> str:
    """The error's type and the first line of its text, which some errors lack."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


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
