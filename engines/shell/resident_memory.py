from __future__ import annotations

import os

from umbra.runtime.process.process_tree import ProcessTree


def resident_nbytes() -> int:
    """Bytes resident in this process and its descendants; memory that they share counts once."""
    tree = ProcessTree(os.getpid())
    tree.look()
    return tree.resident_nbytes()


def physical_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
