from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, cast

from umbra.trainer.reporting.metrics_loggers import EvalSample, MetricsRow
from umbra.trainer.world.run_files import HeldFolder, write_text


class MetricsLog:
    """Appends a line per step to `folder`/metrics.jsonl, and one per evaluation to
    `folder`/eval_samples.jsonl. umbra reads both itself. A `MetricsLogger`. Lines from `first_step`
    on are from before a rollback, and are removed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self._samples_path = folder / "eval_samples.jsonl"
        self._first_step = first_step
        self._folder = HeldFolder(folder)

    def __enter__(self) -> Self:
        for path in (self.path, self._samples_path):
            _keep_steps_before(path, self._first_step)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Has nothing to close."""

    def write(self, step: int, row: MetricsRow) -> None:
        """A reader sees the step at once. Raises RunDirectoryError as `append` does."""
        self._append(self.path.name, step, row)

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        self._append(self._samples_path.name, step, {"samples": [asdict(s) for s in samples]})

    def _append(self, name: str, step: int, row: Mapping[str, Any]) -> None:
        line = {"step": step, "time": round(time.time(), 3), **row}
        self._folder.append(name, json.dumps(line))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines of a metrics.jsonl, except torn lines and lines that are not metrics."""
    return _read_rows(path)


def merge_steps(rows: Sequence[MetricsRow]) -> list[dict[str, float]]:
    """One row for each step, with its evaluation: the last, because a resumed run repeats one."""
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return list(merged.values())


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row: Any = json.loads(line)
                if isinstance(row, dict) and "step" in row:
                    rows.append(cast("dict[str, Any]", row))
    return rows


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Replaces the file as a whole, so that a kill halfway does not lose rows."""
    rows = _read_rows(path)
    kept = [row for row in rows if row["step"] < first_step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
