"""Logs metrics as TensorBoard events, in the run directory's folder `tensorboard`."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from types import TracebackType
from typing import Any, Self

from umbra.trainer.reporting.metrics_logger import LoggedRun, MetricsRow
from umbra.trainer.run_files import writing


class TensorboardLogger:
    """A `MetricsLogger`; owns its event file.

    TensorBoard's own writer has a thread. A full disk would print a stack trace there, and umbra
    would not notice it before the next step.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._protobuf: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        with writing("write to", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / name).open("ab")
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
        # All events were flushed, so a failure to close is not an error.
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, step: int, row: MetricsRow) -> None:
        """Raises RunDirectoryError if the disk is full or the like."""
        values = [{"tag": name, "simple_value": value} for name, value in row.items()]
        with writing("write to", self._folder):
            self._put(step=step, summary={"value": values})

    def _put(self, **fields: Any) -> None:
        event = self._protobuf.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._file.flush()
