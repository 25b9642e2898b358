"""The end of a process: waiting for it, and its exit status in words."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_OWN_FAULTS: Final = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals that a program raises by its own doing, and would raise again."""

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to end. umbra's processes then exit with 128 + the signal's number."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """`code` as subprocess returns it: N for exit status N, -N for signal N; None: unknown."""

    code: int | None

    @property
    def signal_name(self) -> str | None:
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"  # Real-time signals have no name.

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The stop signal that killed it, or to which it reacted by exiting."""
        for number in STOP_SIGNALS:
            if self.code in (-number, 128 + number):
                return number
        return None

    @property
    def is_from_outside(self) -> bool:
        """Whether a signal from others ended it: the kernel out of memory, or an operator."""
        if self.stop_signal is not None:
            return True
        return self.signal_name is not None and -(self.code or 0) not in _OWN_FAULTS

    def __str__(self) -> str:
        if self.code is None:
            return "ended with unknown status"
        if self.signal_name is not None:
            return f"killed by {self.signal_name} ({-self.code})"
        if self.stop_signal is not None:
            return f"stopped by {self.stop_signal.name} (exit status {self.code})"
        return f"exited with status {self.code}"


class PidWatch:
    """Calls `callback` once on the running loop when process `pid`, child or not, ends, or has
    ended. Must be closed before the loop ends. Does not reap."""

    def __init__(self, pid: int, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
            self._soon: asyncio.Handle | None = self._loop.call_soon(callback)
            return
        self._soon = None
        self._loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    def of_parent(cls, expected_pid: int, callback: Callable[[], None]) -> PidWatch:
        """Watches our parent; also calls back if another process is our parent by now."""
        watch = cls(expected_pid, callback)
        # Checked after the pidfd was opened, which therefore is our parent's.
        if os.getppid() != expected_pid and watch._pidfd >= 0:
            watch.close()
            watch._soon = watch._loop.call_soon(callback)
        return watch

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> PidWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _on_exit(self) -> None:
        self.close()
        self._callback()
