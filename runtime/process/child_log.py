from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from umbra.runtime.disk import explain
from umbra.runtime.errors import ConfigError

_TAIL_NBYTES = 64 * 1024
"""Bytes read for a tail. More would block the loop on a slow disk; far less could miss the
beginning of a long traceback."""

_ERROR_NBYTES = 1 << 20
"""Bytes read to find the first error, from the incarnation's beginning."""
_OR_ELSE: Final = ", or set another run directory"
_PREFIX: Final = re.compile(r"^\([^)]*\) [A-Z]+ .*?\] ?|^\[[^]]*\] |^ *[|+] ")
# The text that loggers and exception groups put before a traceback's lines: "(Worker pid=7) ERROR
# 11-22 [file:3] ", "[TP0] ", "    | ".
_TRACEBACK: Final = "Traceback (most recent call last):"
# SGLang writes it mid-line: "[11-22 01:37:48 TP0] Scheduler hit an exception: Traceback ...".
_ERROR: Final = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt)(: .*)?$")
_NUM_BEFORE: Final = 2  # lines of a traceback that go with its error: where, and the code there


@dataclass(frozen=True, slots=True)
class ChildLog:
    """The stdout and stderr of a child over all its incarnations, this one from `start_offset`."""

    path: Path
    start_offset: int

    @classmethod
    def begin(cls, path: Path, title: str) -> ChildLog:
        header = f"==== {title} ==== {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(header)
                return cls(path, file.tell())
        except OSError as error:
            raise ConfigError(
                f"cannot write log {path}: {explain(error, path, or_else=_OR_ELSE)}"
            ) from error

    def open_for_child(self) -> BinaryIO:
        """A file to pass to the child; appending, so that writers do not overwrite each other."""
        return self.path.open("ab", buffering=0)

    def tail(self, max_lines: int) -> str:
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.start_offset, end - _TAIL_NBYTES))
                text = file.read(_TAIL_NBYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-max_lines:])

    def first_error(self) -> str:
        """The first traceback's last lines; empty if there is none. If several processes write,
        the first error caused the others, and by the end of all their tracebacks it is far
        above the tail."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start_offset)
                text = file.read(_ERROR_NBYTES).decode(errors="replace")
        except OSError:
            return ""
        before: list[str] = []
        in_traceback = False
        for line in (_PREFIX.sub("", raw, count=1) for raw in text.splitlines()):
            in_traceback = in_traceback or _TRACEBACK in line
            if in_traceback and _ERROR.match(line):
                return "\n".join([*before[-_NUM_BEFORE:], line])
            if line.strip(" ^~"):
                before.append(line)
        return ""
