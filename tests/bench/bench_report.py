"""What benchmark scripts share: options, progress, medians, and a description of the hardware."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_BEGAN: Final = "UMBRA_BENCH_BEGAN"
# time.monotonic() of the first line of progress. Child processes inherit the variable.


class BenchError(RuntimeError):
    """A system under test did not run; the message has its last output."""


def options_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with `--rounds`; its description is the docstring's first line."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=5, help="for medians (default 5)")
    return parser


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def progress(text: str) -> None:
    """Prints a line with the seconds since the benchmark's first line to standard error."""
    now = time.monotonic()
    began = float(os.environ.setdefault(_BEGAN, str(now)))
    print(f"{now - began:6.1f} s: {text}", file=sys.stderr, flush=True)


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number over the rounds; the most frequent of each text."""
    medians: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        is_text = isinstance(values[0], str)
        medians[key] = statistics.mode(values) if is_text else round(statistics.median(values), 4)
    return medians


def describe_hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, load while starting, kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }
