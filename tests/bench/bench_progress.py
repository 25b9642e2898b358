"""Standard error of a benchmark: its progress, and why it failed."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

_BEGAN: Final = "UMBRA_BENCH_BEGAN"
# time.monotonic() of the first line. Child processes inherit the variable.


class BenchError(RuntimeError):
    """A system under test did not run; the message has its last output."""


def progress(text: str) -> None:
    """Prints a line with the seconds since the benchmark's first line."""
    now = time.monotonic()
    began = float(os.environ.setdefault(_BEGAN, str(now)))
    print(f"{now - began:6.1f} s: {text}", file=sys.stderr, flush=True)
