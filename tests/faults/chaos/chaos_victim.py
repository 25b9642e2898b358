"""One incarnation of a process, identified so that a signal cannot hit another process."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Final, Self

from umbra.runtime.cluster.environment import ACTOR_VARIABLE
from umbra.runtime.process.descendants import process_stat

_POLL_S: Final = 0.005
"""Interval of reading /proc: a process that stops cannot be awaited."""


class Victim:
    """Owns a pidfd. A context manager.

    Args:
        label: NAME#INCARNATION.

    Raises:
        ProcessLookupError: no such process, or it is another incarnation.
    """

    def __init__(self, label: str, pid: int) -> None:
        self.label = label
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        if not self._is_itself():
            os.close(self._pidfd)
            raise ProcessLookupError(f"process {pid} is not {label}")

    def _is_itself(self) -> bool:
        """Called with the pidfd open, so that what is read belongs to that process or to none."""
        try:
            environment = Path(f"/proc/{self._pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{ACTOR_VARIABLE}={self.label}".encode() in environment and not self.has_ended()

    def send(self, signum: signal.Signals) -> None:
        """Raises ProcessLookupError if it has ended."""
        signal.pidfd_send_signal(self._pidfd, signum)

    def has_ended(self, within_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def is_stopped(self, within_s: float = 0.0) -> bool:
        deadline = time.monotonic() + within_s
        while (stat := process_stat(self._pid)) is not None and not self.has_ended():
            if stat.state == "T":
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._pidfd)
