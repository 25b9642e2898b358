"""Writing into the run directory: all or nothing, and with errors that name what to do."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import UmbraError

_REMEDIES: Final = {
    errno.ENOSPC: "the disk is full: free some space, lower train.keep_checkpoints, or point "
    "run.dir to another disk",
    errno.EDQUOT: "the disk quota is used up: free some space or point run.dir elsewhere",
    errno.EROFS: "it is on a read-only file system: point run.dir to a place that can be written",
    errno.EACCES: "permission denied: change its owner or mode, or point run.dir elsewhere",
    errno.EPERM: "not permitted: change its owner or mode, or point run.dir elsewhere",
    errno.ENOTDIR: "a part of that path is a file, not a folder: point run.dir elsewhere",
    errno.EEXIST: "a file of that name is in the way: point run.dir elsewhere",
}


class RunDirectoryError(UmbraError):
    """Something cannot be written to, or read from, the run directory."""


def describe_os_error(
    what: str, path: Path, error: OSError, otherwise: str = ""
) -> RunDirectoryError:
    """The same error in words: what was attempted, where, why, and the remedy.

    Args:
        otherwise: the remedy, with what goes before it, where the error itself tells none.
    """
    reason = _REMEDIES.get(error.errno or 0, (error.strerror or str(error)) + otherwise)
    return RunDirectoryError(f"cannot {what} {path}: {reason}")


@contextmanager
def writing(what: str, path: Path) -> Generator[None]:
    """Turns an OSError inside the block into a RunDirectoryError about `path`."""
    try:
        yield
    except OSError as error:
        raise describe_os_error(what, path, error) from error


def check_writable(folder: Path, rank: int) -> None:
    """Makes `folder` and a file in it; raises RunDirectoryError where that fails."""
    with writing("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{rank}-{os.getpid()}"
        try:
            probe.write_bytes(b"umbra")
        finally:
            probe.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` durably; a reader sees the old text or the new, never a part."""
    with writing("write", path):
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with scratch.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` durably with indented JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
