"""Parts of a benchmark's result: its medians, and the hardware that it ran on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def describe_hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, load while starting, kernel."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number over the rounds; the most frequent of each text."""
    medians: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        is_text = isinstance(values[0], str)
        medians[key] = statistics.mode(values) if is_text else round(statistics.median(values), 4)
    return medians
