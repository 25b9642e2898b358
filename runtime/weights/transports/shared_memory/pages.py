"""Makes memory present before data is copied to it, and returns free memory.

The first write to a fresh page traps into the kernel, which finds and zeroes it: on a virtual
machine a copy to 512 MB of fresh memory took 1290 ms, to the same memory again 54 ms.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

_MADV_POPULATE_READ: Final = 22  # Linux 5.14; not in the mmap module of Python 3.11
_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate_mapping(memory: mmap.mmap) -> None:
    """Makes every page of a shared mapping present. Contents are kept, even while others write.

    Reading is enough, because pages of shared memory are mapped writable at once: 2 ms for 32 MiB
    that exist already, where populating for writing takes 7 ms.
    """
    try:
        memory.madvise(_MADV_POPULATE_READ)
    except OSError:  # an older kernel
        for start in range(0, len(memory), mmap.PAGESIZE):
            memory[start]


def populate_range(address: int, nbytes: int) -> None:
    """Makes the whole pages within private memory present, as huge pages where allowed.

    Best effort: if the kernel declines, the pages come at first use.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _libc.madvise(start, length, mmap.MADV_HUGEPAGE)
        _libc.madvise(start, length, _MADV_POPULATE_WRITE)


def trim_heap() -> None:
    """Returns freed heap pages to the operating system if the C library can do that (glibc)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
