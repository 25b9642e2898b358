"""Allows one run at a time in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from umbra.runtime.errors import ConfigError
from umbra.trainer.run_files import writing

_LOOK_INTERVAL_S: Final = 0.5
"""Between attempts to get the lock. A longer one delays a restart; each asks the file system."""


class RunLock:
    """Held by rank 0 while its process uses the directory; the kernel releases it.

    Args:
        within_s: how long another process may hold it still: a network file system may learn late
            that the node of the last rank 0 is lost.
    """

    def __init__(self, folder: Path, within_s: float = 0.0) -> None:
        self._path = folder / ".lock"
        self._fd = -1
        self._within_s = within_s

    def __enter__(self) -> Self:
        """Raises ConfigError if another process holds it, RunDirectoryError without a file."""
        with writing("write", self._path):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + self._within_s
        while not (is_held := self._try_lock()) and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
        if not is_held:
            holder = os.read(self._fd, 200).decode(errors="replace").strip()
            self.__exit__(None, None, None)
            raise ConfigError(
                f"run.dir: {self._path.parent} is in use by {holder or 'another run'}: wait for "
                "its end, or choose another directory"
            )
        try:
            with writing("write", self._path):
                os.truncate(self._fd, 0)
                os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)
