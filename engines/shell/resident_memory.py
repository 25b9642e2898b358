"""The machine's memory, and what processes take of it."""

from __future__ import annotations

import os

from umbra.runtime.process.process_tree import ProcessTree


def resident_nbytes() -> int:
    """Of this process and all below it, in bytes; memory that they share counts once."""
    tree = ProcessTree(os.getpid())
    tree.look()
    return tree.resident_nbytes()


def physical_nbytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
