"""Writes into the run directory: all or nothing, and with errors that name the remedy."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from umbra.runtime.disk import (
    explain,
    os_error_behind,
    replacing,
    scratch_path,
    sync,
)
from umbra.runtime.errors import UmbraError

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class RunDirectoryError(UmbraError):
    """A file of the run directory cannot be written or read."""


@contextmanager
def writing(what: str, path: Path, needed_nbytes: int = 0) -> Generator[None]:
    """Turns an OSError inside the block into a RunDirectoryError about `path`, also one that a
    library has wrapped in another error. It has what was attempted, where, why, and the remedy.
    `needed_nbytes` is 0 if what is to be written is small."""
    try:
        yield
    except UmbraError:
        raise
    except Exception as error:
        cause = error if isinstance(error, OSError) else os_error_behind(error)
        if cause is None:
            raise
        or_else = ", or point run.dir to a place that can be written"
        if cause.errno == errno.ENOSPC:
            or_else = ", lower train.keep_checkpoints, or point run.dir to another disk"
        reason = explain(cause, path, needed_nbytes=needed_nbytes, or_else=or_else)
        raise RunDirectoryError(f"cannot {what} {path}: {reason}") from error


class HeldFolder:
    """A folder that a run uses, wherever it is moved meanwhile. Holds it open until it is garbage.

    `mv` of a run directory leaves open files in it, and paths lead to nothing: files that are
    opened later would be apart from those, and no checkpoint could be resumed from.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing("open", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    @property
    def path(self) -> Path:
        """Raises RunDirectoryError if the folder was removed."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return self._path
        found = os.readlink(f"/proc/self/fd/{self._fd}")
        if not os.path.isdir(found):  # the kernel appends " (deleted)"
            raise RunDirectoryError(
                f"{self._path} was removed while this run used it: what it wrote there is lost"
            )
        return Path(found)

    @property
    def inside(self) -> Path:
        """The folder to this process, wherever it is. No name for others, or for messages."""
        return Path(f"/proc/self/fd/{self._fd}")

    def append(self, name: str, line: str) -> None:
        """Appends a line to a file in it, also if an editor has replaced or removed that file.
        Raises RunDirectoryError if the disk is full or the like, or the folder was removed."""
        path = self.path / name
        with writing("write", path), path.open("a+b") as file:
            file.write(_missing_newline(file) + line.encode() + b"\n")


def _missing_newline(file: BinaryIO) -> bytes:
    """The newline that a file with a torn last line lacks; leaves the position at its end."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


@contextmanager
def replacing_folder(path: Path) -> Generator[Path]:
    """An empty folder that replaces `path` when the block ends, complete and synced.

    Readers see the old folder or the new one at any time, even after a kill. NFS, Lustre and other
    file systems that cannot exchange two names atomically have no folder between two renames; after
    a kill at that moment, `restore_folder` brings the old one back.
    """
    path = path.resolve()
    restore_folder(path)
    scratch = scratch_path(path)
    try:
        scratch.mkdir(parents=True)
        yield scratch
        for entry in (*scratch.rglob("*"), scratch):
            sync(entry)
        _swap_in(scratch, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # the new folder is in place, or an error is raised
            remove(scratch)


def restore_folder(path: Path) -> None:
    """Cleans up after a killed `replacing_folder`, and restores a folder that it moved away."""
    path = path.resolve()
    old, scratch = _moved_away(path), scratch_path(path)
    remove(scratch)
    if old.exists():  # renamed first, so that it is removed under the scratch name
        old.rename(scratch if path.exists() else path)
        remove(scratch)


def remove(path: Path) -> None:
    """Removes a file, or a folder with its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swap_in(scratch: Path, path: Path) -> None:
    """Renames `scratch` to `path`; the former `path`, if any, becomes `scratch`."""
    if not path.exists():
        scratch.rename(path)
    elif not _exchange(scratch, path):
        old = _moved_away(path)
        path.rename(old)
        scratch.rename(path)
        old.rename(scratch)


def _moved_away(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically; False if the file system or libc cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    except AttributeError:
        return False
    number = ctypes.get_errno()
    if failed and number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), str(one), None, str(other))
    return not failed


def check_writable(folder: Path) -> None:
    """Creates `folder` and a file in it; raises RunDirectoryError if that fails."""
    with writing("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:  # nameless, so a kill leaves nothing
            probe.write(b"umbra")


def write_text(path: Path, text: str) -> None:
    """Replaces `path` durably; a reader sees the old text or the new, never a part."""
    with writing("write", path), replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` durably with indented JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")
