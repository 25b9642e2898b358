"""Logs metrics as TensorBoard events, in the run directory's folder `tensorboard`."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Final, Self

from umbra.trainer.reporting.eval_sample import EvalSample
from umbra.trainer.reporting.metrics_logger import LoggedRun, MetricsRow
from umbra.trainer.run_files import writing

# Of TensorBoard's protocol buffers.
_DT_STRING: Final = 7
_DATA_CLASS_TENSOR: Final = 2


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

    def write_samples(self, step: int, samples: Sequence[EvalSample]) -> None:
        """As one table; raises as `write` does.

        TensorBoard reads cells as Markdown. Their texts are code blocks, which show them unchanged.
        """
        columns = [field.name for field in fields(EvalSample)]
        cells = [[_code_block(str(getattr(each, name))) for name in columns] for each in samples]
        table = [columns, *cells]
        tensor = {
            "dtype": _DT_STRING,
            "tensor_shape": {"dim": [{"size": len(table)}, {"size": len(columns)}]},
            "string_val": [cell.encode() for row in table for cell in row],
        }
        metadata = {"plugin_data": {"plugin_name": "text"}, "data_class": _DATA_CLASS_TENSOR}
        value = {"tag": "eval/samples", "tensor": tensor, "metadata": metadata}
        with writing("write to", self._folder):
            self._put(step=step, summary={"value": [value]})

    def _put(self, **fields: Any) -> None:
        event = self._protobuf.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._file.flush()


def _code_block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
