"""Appends the metrics of each step to metrics.jsonl, which umbra reads itself."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from umbra.trainer.reporting.metrics_logger import MetricsRow
from umbra.trainer.run_files import write_text, writing


class MetricsLog:
    """Appends one line per step to `folder`/metrics.jsonl. A `MetricsLogger`; owns the file.

    Lines of steps that a resumed run will repeat are removed.

    Args:
        first_step: the first step that this run will log; later lines are from before a rollback.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self._first_step = first_step
        self._file: TextIO

    def __enter__(self) -> Self:
        with writing("write", self.path):
            _keep_steps_before(self.path, self._first_step)
            self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # If another error ended the run, that one must be raised, not a failure to close this file.
        with writing("write", self.path) if error is None else contextlib.suppress(OSError):
            self._file.close()

    def write(self, step: int, row: MetricsRow) -> None:
        """Logs a step; flushed, so that a reader sees it at once.

        Raises:
            RunDirectoryError: the disk is full or the like.
        """
        line = {"step": step, "time": round(time.time(), 3), **row}
        with writing("write", self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines of a metrics.jsonl, except torn lines and lines that are not metrics."""
    rows: list[dict[str, float]] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row: Any = json.loads(line)
                if isinstance(row, dict) and "step" in row:
                    rows.append(cast("dict[str, float]", row))
    return rows


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Replaces the file as a whole, so that a kill halfway does not lose rows."""
    rows = read_metrics(path)
    kept = [row for row in rows if row["step"] < first_step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
