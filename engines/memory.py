"""The machine's memory, and what processes take of it."""

from __future__ import annotations

import os

from umbra.runtime.process import descendants


def resident_nbytes() -> int:
    """Resident set size of this process, in bytes (Linux)."""
    return _resident_nbytes(os.getpid())


def tree_resident_nbytes() -> int:
    """The same of this process and all below it; pages that they share count more than once."""
    below = (pid for pid, _ in descendants.living_descendants(os.getpid()))
    return resident_nbytes() + sum(_resident_nbytes(pid) for pid in below)


def physical_nbytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident_nbytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
