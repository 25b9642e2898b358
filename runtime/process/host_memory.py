"""Memory of the host: memfds and pages."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from umbra.runtime.disk import explain, format_nbytes
from umbra.runtime.errors import WeightSyncError

_MADV_POPULATE_READ: Final = 22  # Linux 5.14; not in the mmap module of Python 3.11
_MADV_POPULATE_WRITE: Final = 23
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def create_memory(name: str, nbytes: int, *, is_allocated: bool = True) -> int:
    """Creates a memfd of `nbytes`, close-on-exec, sealed so that no peer can change its size:
    truncation would kill every process that has it mapped (SIGBUS). The caller owns the descriptor.

    The supervisor creates the memory and serves its descriptors (`fd_server`); ranks and engines
    request one by name and map it. The memory has no entry in a file system, so it is freed when
    the last process closes it or dies.

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
        raise WeightSyncError(
            f"cannot make {nbytes} bytes of shared memory: {refusal(error)}"
        ) from error
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
        raise WeightSyncError(
            f"cannot map {nbytes} bytes of shared memory: {refusal(error)}"
        ) from error


def refusal(error: OSError, system: Path = Path("/proc")) -> str:
    """Why the kernel refused memory, and the remedy. A memfd is in no file system: ENOSPC means
    that the kernel commits no more memory, as does EFAULT where a mapping is populated."""
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
        return explain(error, system)
    reasons, commits = list[str](), ""
    with suppress(OSError):  # a sandbox may lack the file
        commits = (system / "sys/vm/overcommit_memory").read_text().strip()
    if commits == "2":
        counts = dict(re.findall(r"(Commit\w+): +(\d+) kB", (system / "meminfo").read_text()))
        committed, limit = (
            format_nbytes(int(counts[name]) << 10) for name in ("Committed_AS", "CommitLimit")
        )
        reasons.append(
            f"vm.overcommit_memory is 2, and {committed} of {limit} are committed: raise "
            "vm.overcommit_ratio, or set vm.overcommit_memory to 0"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        reasons.append(f"ulimit -v allows a process {format_nbytes(soft)}: raise it")
    return "; ".join(reasons) or "the system has no more memory"


def unmap(memory: mmap.mmap) -> None:
    """Idempotent. Memory with a view, such as a traceback's, is unmapped with the view."""
    with suppress(BufferError):
        memory.close()


def open_memory_file(name: str, content: bytes) -> BinaryIO:
    """An open file in unnamed memory, for a child. Unlike a pipe it takes any length without
    blocking. `name` shows in /proc/PID/fd only. The memory is freed with the last process
    that has it open."""
    file = open(os.memfd_create(name), "w+b", buffering=0)  # noqa: SIM115 -- the caller's to close
    try:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def populate_mapping(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Makes pages of a shared mapping present, allocating new ones. Contents are kept, even
    while others write.

    The first write to a fresh page traps into the kernel, which finds and zeroes it: on a virtual
    machine a copy to 512 MB of fresh memory took 1290 ms, to the same memory again 54 ms.

    Reading is enough, because pages of a memfd are mapped writable at once: 2 ms for 32 MiB
    that exist already, where populating for writing takes 7 ms. Raises OSError if there is no
    memory; without this call, the first use of a page would end the process (SIGBUS).
    """
    try:
        memory.madvise(_MADV_POPULATE_READ, start, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for at in range(start, start + nbytes, mmap.PAGESIZE):  # an older kernel
            memory[at]


def populate_range(address: int, nbytes: int) -> None:
    """Makes the whole pages within private memory present, as huge pages where allowed. Best
    effort: if the kernel declines, the pages come at first use."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _libc.madvise(start, length, mmap.MADV_HUGEPAGE)
        _libc.madvise(start, length, _MADV_POPULATE_WRITE)


def free_pages(fd: int, start: int, nbytes: int) -> None:
    """Gives pages of a memfd back to the system, even mapped ones, which read zeros from then on.
    Takes 0.2 s for each GiB. Best effort: if the kernel declines, they are free once no process
    has them mapped."""
    _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, nbytes)


def trim_heap() -> None:
    """Returns freed heap pages to the operating system if the C library can do that (glibc)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def physical_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_nbytes(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float:
    """Memory that this process may still take: the machine's, or less by a limit of its cgroup
    (version 2), such as a container's. Files in the page cache do not count as taken."""
    (available,) = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    found = [1024.0 * int(available)]
    place = root / own.read_text(encoding="utf-8").rpartition("::")[2].strip().lstrip("/")
    for cgroup in (place, *place.parents):
        with suppress(OSError, ValueError, KeyError):  # ValueError: "max" is no limit
            limit = int((cgroup / "memory.max").read_text())
            stats = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            found.append(limit - int(stats["anon"]) - int(stats["shmem"]))
    return min(found)
