"""Standard streams whose failure does not end the process.

Writes fail where a reader has died (`| tee`, `| head`), a terminal was closed or a disk is full.
A run keeps its results in its run directory, so text that cannot be written is dropped.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES: Final = {1: "stdout", 2: "stderr"}


class Console:
    """The standard streams of this process. Use `install`."""

    def __init__(self) -> None:
        self._log: Path | None = None
        self._name = ""
        self._files = [_LossyFile(descriptor, self._report) for descriptor in _NAMES]

    @classmethod
    def install(cls) -> Self:
        """Replaces `sys.stdout` and `sys.stderr` by streams that never raise OSError.

        An entry point calls it before anything is opened: closed descriptors (`>&-`) become
        /dev/null. A file that was opened first would get such a descriptor, and what is printed.
        """
        _fill_closed_descriptors()
        console = cls()
        sys.stdout, sys.stderr = (
            _open_text(file, former)
            for file, former in zip(console._files, (sys.stdout, sys.stderr), strict=True)
        )
        return console

    def log_losses(self, path: Path, name: str) -> None:
        """Logs the first failed write of each stream to a file, even if it was before this call.

        Args:
            name: names this process in the line.
        """
        self._name = name
        self._log = path
        for file in self._files:
            if file.failure:
                self._report(file)

    def _report(self, file: _LossyFile) -> None:
        if self._log is None:
            return
        line = (
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._name}: {_NAMES[file.fileno()]} cannot be "
            f"written ({file.failure}): its text is dropped, and nothing else is affected\n"
        )
        # The disk may be full, and there is no other place to report it.
        with contextlib.suppress(OSError), self._log.open("ab", buffering=0) as log:
            log.write(line.encode())


class _LossyFile(io.FileIO):
    """A standard descriptor. `write` returns as if text that could not be written had been.

    Attributes:
        failure: why the first failed write failed; "" until then.
    """

    def __init__(self, descriptor: int, on_failure: Callable[[_LossyFile], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failure = ""
        self._on_failure = on_failure

    def write(self, data: ReadableBuffer, /) -> int:
        num_bytes = memoryview(data).nbytes
        try:
            # None: another process made it non-blocking, and its reader is slow.
            return super().write(data) or num_bytes
        except OSError as error:
            if not self.failure:
                self.failure = error.strerror or str(error)
                self._on_failure(self)
        return num_bytes


def _fill_closed_descriptors() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= max(_NAMES):
        os.set_inheritable(descriptor, True)  # like all standard descriptors
    os.close(descriptor)


def _open_text(file: _LossyFile, former: TextIO | None) -> TextIO:
    """Opens a line-buffered stream, even if Python runs unbuffered (-u), as under torchrun."""
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=former.encoding if former is not None else "utf-8",
        errors=former.errors if former is not None else "backslashreplace",
        line_buffering=True,
    )
