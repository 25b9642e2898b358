from __future__ import annotations

import signal
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
