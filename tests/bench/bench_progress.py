"""What a benchmark does, on standard error while it does it."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

_BEGAN: Final = "UMBRA_BENCH_BEGAN"
# Of time.monotonic(), which all processes of a machine share. They inherit it.


def progress(text: str) -> None:
    """Prints a line with the seconds since the first one of the benchmark's processes."""
    now = time.monotonic()
    began = float(os.environ.setdefault(_BEGAN, str(now)))
    print(f"{now - began:6.1f} s: {text}", file=sys.stderr, flush=True)
