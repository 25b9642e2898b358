"""Shared memory without a name: memfds.

The supervisor creates the memory and serves its descriptors (`fd_server`); ranks and engines
request one by name and map it. The memory has no entry in a file system, so it is freed when the
last process closes it or dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from umbra.runtime.errors import WeightSyncError


def create_memory(name: str, nbytes: int, *, is_allocated: bool = True) -> int:
    """Creates a memfd of `nbytes`, close-on-exec, sealed so that no peer can change its size:
    truncation would kill every process that has it mapped (SIGBUS). The caller owns the descriptor.

    With `is_allocated`, the memory is allocated now, because missing memory at its first use would
    also kill. This blocks: 160 ms for 64 MiB that a virtual machine has never used. Otherwise its
    writers allocate it (`populate_mapping`). Raises WeightSyncError without memory or descriptor.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if is_allocated:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise WeightSyncError(f"cannot make {nbytes} bytes of shared memory: {error}") from error
    return fd


def map_memory(fd: int, nbytes: int) -> mmap.mmap:
    """The first `nbytes` of a memfd, shared and writable. Raises WeightSyncError if
    it is smaller."""
    size_nbytes = os.fstat(fd).st_size
    if size_nbytes < nbytes:
        raise WeightSyncError(f"shared memory has {size_nbytes} bytes, expected {nbytes} or more")
    try:
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        raise WeightSyncError(f"cannot map {nbytes} bytes of shared memory: {error}") from error


def unmap(memory: mmap.mmap) -> None:
    """Idempotent. Memory with a view, such as a traceback's, is unmapped with the view."""
    with suppress(BufferError):
        memory.close()
