"""The numbers of each step, as metrics.jsonl and TensorBoard events. Rank 0 writes them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from umbra.trainer.run_files import write_text, writing

MetricsRow = Mapping[str, float]


class MetricsLog:
    """Appends one line a step to `folder`/metrics.jsonl, and events to `folder`/tensorboard.

    A context manager; owns both files. Lines of steps that a resumed run will do again are cut.

    Args:
        first_step: the first step this run will log; later lines are from before a rollback.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self._folder = folder
        self._first_step = first_step
        self._stack = contextlib.ExitStack()
        self._file: TextIO
        self._events: _EventFile | None = None

    def __enter__(self) -> Self:
        with writing("write", self.path):
            _keep_steps_before(self.path, self._first_step)
            self._file = self._stack.enter_context(self.path.open("a", encoding="utf-8"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What made the run end is the error to see, not that these files cannot be ended well.
        with writing("write", self.path) if error is None else contextlib.suppress(OSError):
            self._stack.close()

    def write(self, step: int, row: MetricsRow) -> None:
        """Logs a step; flushed, so that a reader sees it at once.

        Raises:
            RunDirectoryError: the disk is full or the like.
        """
        line = {"step": step, "time": round(time.time(), 3), **row}
        with writing("write", self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        folder = self._folder / "tensorboard"
        with writing("write to", folder):
            if self._events is None and _has_tensorboard():  # its import takes a while
                self._events = self._stack.enter_context(_EventFile(folder))
            if self._events is not None:
                self._events.add(step, row)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines of a metrics.jsonl; one torn by a crash, or of anything else, is left out."""
    rows: list[dict[str, float]] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row: Any = json.loads(line)
                if isinstance(row, dict) and "step" in row:
                    rows.append(cast("dict[str, float]", row))
    return rows


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Replaces the file as a whole: a kill in the middle must not cost the rows that stay."""
    rows = read_metrics(path)
    kept = [row for row in rows if row["step"] < first_step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class _EventFile:
    """Scalars for TensorBoard. A context manager; owns its file.

    TensorBoard's own writer has a thread, in which a full disk leads to a stack trace and is not
    noticed here before the next step.
    """

    def __init__(self, folder: Path) -> None:
        self._protobuf: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._records = records.RecordWriter(self._file)
        self._put(file_version="brain.Event:2")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, step: int, row: MetricsRow) -> None:
        """All values of a step; flushed."""
        values = [{"tag": name, "simple_value": value} for name, value in row.items()]
        self._put(step=step, summary={"value": values})

    def _put(self, **fields: Any) -> None:
        event = self._protobuf.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._file.flush()
