"""Writing files whole or not at all, and the words for a disk that refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

_KNOWN: Final[Mapping[int, tuple[str, str]]] = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("the file would be larger than allowed here", "raise ulimit -f"),
    errno.EROFS: ("it is on a read-only file system", "mount it writable"),
    errno.EACCES: ("permission denied", "change its owner or mode"),
    errno.EPERM: ("not permitted", "change its owner or mode"),
    errno.ENOTDIR: ("a part of that path is a file, not a folder", "move that file away"),
    errno.EEXIST: ("a file of that name is in the way", "move that file away"),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "choose a shorter one"),
    errno.ESTALE: ("the file system went away under it", "mount it again"),
    errno.EIO: ("the disk or the file server failed", "see the kernel's log"),
}
"""Cause and remedy."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_RUST_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file that takes the place of `path` when the block ends: written and synced as a whole.

    A reader sees the old file or the new one. Where the block raises, the old one stays. One
    process at a time may write `path`: what a killed one left is overwritten by the next.
    """
    scratch = scratch_path(path)
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def scratch_path(path: Path) -> Path:
    """Where the successor of `path` is made, before it takes that name.

    The name is always the same, so that whoever writes next finds what a killed process left.
    """
    return path.with_name(f".{path.name}.new")


def sync(path: Path) -> None:
    """Makes a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def os_error_behind(error: BaseException) -> OSError | None:
    """The OSError that led to `error`, as far as `explain` knows its cause and remedy.

    Libraries put errors of their own over it. torch complains that its file has another length
    than what it has written, and safetensors has the error's number in its text only.
    """
    seen: BaseException | None = error
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else _number_in(str(seen))
        if number is not None and number in _KNOWN:
            return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


def _number_in(text: str) -> int | None:
    """Of an error of the operating system, as Rust's programs write it."""
    found = _RUST_OS_ERROR.search(text)
    return int(found[1]) if found else None


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def check_room(path: Path, needed_nbytes: int) -> None:
    """Raises OSError (ENOSPC) where `path` is sure not to fit on its file system.

    What it does not see, such as a quota, is met while writing.
    """
    stats = os.statvfs(_existing(path))
    if stats.f_blocks and _free_nbytes(stats) < needed_nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def explain(
    error: OSError, path: Path, *, needed_nbytes: int = 0, or_else: str = "", otherwise: str = ""
) -> str:
    """Why `path` could not be written, and the remedy.

    Such as "the disk is full (needs about 1.9 GiB, 312.0 MiB free on /mnt/x): free some space".

    Args:
        needed_nbytes: size of what was to be written; 0 where it is small.
        or_else: follows the remedy, where one is known.
        otherwise: follows the cause, where no remedy is known.
    """
    known = _KNOWN.get(error.errno or 0)
    if known is None:
        return (error.strerror or str(error)) + otherwise
    cause, remedy = known
    if error.errno in _FULL:
        numbers = [f"needs about {format_nbytes(needed_nbytes)}"] if needed_nbytes else []
        if error.errno == errno.ENOSPC:
            numbers += _describe_free(path)
        cause += f" ({', '.join(numbers)})" if numbers else ""
    return f"{cause}: {remedy}{or_else}"


def format_nbytes(nbytes: int) -> str:
    """Such as "1.9 GiB"."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    exponent = min((nbytes.bit_length() - 1) // 10, len(_UNITS))
    return f"{nbytes / 1024**exponent:.1f} {_UNITS[exponent - 1]}"


def _describe_free(path: Path) -> list[str]:
    """What is left where `path` is; nothing where the file system does not tell."""
    try:
        place = _existing(path)
        stats = os.statvfs(place)
    except OSError:
        return []
    mount = next(folder for folder in (place, *place.parents) if os.path.ismount(folder))
    if stats.f_files and not stats.f_ffree:
        return [f"no inode free on {mount}: too many files"]
    return [f"{format_nbytes(_free_nbytes(stats))} free on {mount}"] if stats.f_blocks else []


def _existing(path: Path) -> Path:
    """The nearest folder of `path` that is there."""
    place = path.absolute().resolve()
    return next(folder for folder in (place, *place.parents) if folder.exists())


def _free_nbytes(stats: os.statvfs_result) -> int:
    """For this process: a part of some disks is kept for root."""
    return stats.f_frsize * (stats.f_bavail if os.geteuid() else stats.f_bfree)
