"""The hardware that a benchmark ran on."""

from __future__ import annotations

import os
import platform
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
