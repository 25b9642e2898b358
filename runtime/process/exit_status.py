"""How a process ended, and how to say it."""

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
"""What a program gets for what it does itself, and would get again."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """`code` as subprocess gives it: N for exit status N, -N for signal N; None: not known."""

    code: int | None

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def signal_name(self) -> str | None:
        """Such as SIGKILL; None where no signal ended it."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"  # Real-time signals have no name.

    @property
    def is_from_outside(self) -> bool:
        """A signal that others send ended it: the kernel where memory is short, an operator."""
        return self.signal_name is not None and -(self.code or 0) not in _OWN_FAULTS

    def __str__(self) -> str:
        if self.code is None:
            return "ended with unknown status"
        if self.signal_name is not None:
            return f"killed by {self.signal_name} ({-self.code})"
        return "exited normally" if self.code == 0 else f"exited with status {self.code}"
