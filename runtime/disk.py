"""Writes files whole or not at all, and explains errors of a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Generator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, Final

from umbra.runtime.errors import ConfigError

_KNOWN: Final[Mapping[int, tuple[str, str]]] = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("the file would be larger than allowed here", "raise ulimit -f"),
    errno.EROFS: ("it is on a read-only file system", "mount it writable"),
    errno.EACCES: ("permission denied", "change its owner or mode"),
    errno.EPERM: ("not permitted", "change its owner or mode"),
    errno.ENOTDIR: ("a part of that path is a file, not a folder", "move that file away"),
    errno.EEXIST: ("a file of that name is in the way", "move that file away"),
    errno.EISDIR: ("a folder of that name is in the way", "move that folder away"),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "choose a shorter one"),
    errno.ESTALE: ("the file system went away under it", "mount it again"),
    errno.EMFILE: ("too many open files", "raise ulimit -n"),
    errno.EIO: ("the disk or the file server failed", "see the kernel's log"),
}
"""Cause and remedy of each."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FEW_FILES: Final = 100
"""Below as many, a file system that has bytes was probably full of files. XFS and ZFS count free
inodes by free bytes."""
_RUST_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file that replaces `path` when the block ends, written and synced as a whole. A reader
    sees the old file or the new one. If the block raises, the old one stays. One process at a time
    may write `path`."""
    scratch = scratch_path(path)
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_output(path: Path) -> Generator[None]:
    """Makes the folder of the file or folder that a command's user named. Turns an OSError inside
    the block into a ConfigError about `path`."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        remedy = "choose another name"
        reason = explain(error, path, or_else=f", or {remedy}", otherwise=f": {remedy}")
        raise ConfigError(f"cannot write {path}: {reason}") from error


def scratch_path(path: Path) -> Path:
    """The path of a new file before it is renamed: fixed, so that leftovers are overwritten."""
    return path.with_name(f".{path.name}.new")


def sync(path: Path) -> None:
    """Makes a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_kept(descriptor: int) -> None:
    """Raises OSError if an open file was removed, but not if it was moved."""
    if os.fstat(descriptor).st_nlink == 0:
        raise OSError(errno.ENOENT, "it was removed while this run wrote to it")


def similar_path(path: Path) -> str:
    """`, did you mean X?` for a path that does not exist, if its folder has a similar name."""
    try:
        similar = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return ""
    return f", did you mean {path.parent / similar[0]}?" if similar else ""


def os_error_behind(error: BaseException) -> OSError | None:
    """The OSError that led to `error`, if `explain` knows its cause and remedy. Libraries wrap it
    in errors of their own. torch complains that its file has another length than it has written,
    and safetensors has the error number only in its text."""
    seen: BaseException | None = error
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else _number_in(str(seen))
        if number is not None and number in _KNOWN:
            return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


def _number_in(text: str) -> int | None:
    """The number of an operating-system error in the format of Rust programs."""
    found = _RUST_OS_ERROR.search(text)
    return int(found[1]) if found else None


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def check_free_space(path: Path, needed_nbytes: int) -> None:
    """Raises OSError (ENOSPC) if `path` cannot fit; other limits, such as quotas, show later."""
    stats = os.statvfs(_existing(path))
    if stats.f_blocks and _free_nbytes(stats) < needed_nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def explain(
    error: OSError, path: Path, *, needed_nbytes: int = 0, or_else: str = "", otherwise: str = ""
) -> str:
    """Why `path` could not be written, and the remedy. For example "the disk is full (needs about
    1.9 GiB, 312.0 MiB free on /mnt/x): free some space". `or_else` follows the remedy, `otherwise`
    the cause if no remedy is known."""
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
    """For example "1.9 GiB"."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    exponent = min((nbytes.bit_length() - 1) // 10, len(_UNITS))
    return f"{nbytes / 1024**exponent:.1f} {_UNITS[exponent - 1]}"


def _describe_free(path: Path) -> list[str]:
    """The free space at `path`; empty if the file system does not report it."""
    try:
        nearest = _existing(path)
        stats = os.statvfs(nearest)
    except OSError:
        return []
    mount = next(folder for folder in (nearest, *nearest.parents) if os.path.ismount(folder))
    has_bytes = _free_nbytes(stats) > _FEW_FILES * stats.f_frsize
    if stats.f_files and stats.f_ffree < _FEW_FILES and has_bytes:  # those of the run are removed
        return [f"only {stats.f_ffree} inodes free on {mount}: too many files"]
    return [f"{format_nbytes(_free_nbytes(stats))} free on {mount}"] if stats.f_blocks else []


def _existing(path: Path) -> Path:
    target = path.absolute().resolve()
    return next(folder for folder in (target, *target.parents) if folder.exists())


def _free_nbytes(stats: os.statvfs_result) -> int:
    """Some file systems reserve a part for root."""
    return stats.f_frsize * (stats.f_bavail if os.geteuid() else stats.f_bfree)
