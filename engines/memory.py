"""The machine's memory, and what this process takes of it."""

from __future__ import annotations

import os


def resident_nbytes() -> int:
    """Resident set size of this process, in bytes (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def physical_nbytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
