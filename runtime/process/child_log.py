"""The log of one named child: its stdout and stderr over all its incarnations, appended."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from umbra.runtime.errors import ConfigError

_TAIL_NBYTES = 64 * 1024
"""Most that is read for a tail. More would block the loop on a slow disk; far less could miss the
beginning of a long traceback."""


@dataclass(frozen=True, slots=True)
class ChildLog:
    """A log file, and where in it this incarnation begins."""

    path: Path
    start_offset: int

    @classmethod
    def begin(cls, path: Path, title: str) -> ChildLog:
        """Append a header line. Raises ConfigError where that fails (read-only, disk full)."""
        header = f"==== {title} ==== {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(header)
                return cls(path, file.tell())
        except OSError as error:
            raise ConfigError(
                f"cannot write log {path}: {error.strerror}; make room there, or set another "
                "run directory"
            ) from error

    def open_for_child(self) -> BinaryIO:
        """To hand to the child; appending, so that writers do not overwrite each other."""
        return self.path.open("ab", buffering=0)

    def tail(self, max_lines: int) -> str:
        """The last lines of this incarnation, at most 64 KiB; empty where there is nothing."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.start_offset, end - _TAIL_NBYTES))
                text = file.read(_TAIL_NBYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-max_lines:])
