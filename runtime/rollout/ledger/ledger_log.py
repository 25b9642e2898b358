"""Writes the files of one incarnation of a ledger.

A new incarnation takes over in this order: it creates its first file (O_EXCL), finds the valid
bytes of earlier incarnations, syncs them, and writes its header. After each sync, a writer checks
whether a next incarnation has a file; if so, it acknowledges nothing. Acknowledged bytes were
therefore on disk before the next incarnation read the files, and are in every later history. No
locks are needed, and none would work on NFS.

A writer that was stopped or cut off, and wakes after that, writes to its own files only, behind the
bytes that its successor's header counts. It does so even if another ledger has its path by then,
because it holds the folder open. A file that was removed is noticed with the next sync.
"""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NoReturn

from umbra.runtime.disk import check_kept, explain, sync
from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger import ledger_frames
from umbra.runtime.rollout.ledger.ledger_history import (
    Header,
    History,
    Position,
    files_of,
    part_name,
    read_history,
)

_PART_NBYTES: Final = 32 * 1024 * 1024
"""Size at which a new part begins. Larger costs memory when read; smaller makes many files."""
_LEVEL: Final = 4
"""zlib: lower takes 15 % less time for 10 % more bytes; higher twice the time for 3 % less."""
_MAX_TAKERS: Final = 16  # managers that may take over at the same moment
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_GONE: Final = "; it was removed, or its file system is no longer mounted"
_LOST: Final = (
    "; a run in another run.dir can begin from a checkpoint of this one (run.resume=PATH)"
)


class LedgerLog:
    """The files of one incarnation, open for writing. Blocking: must be used in a thread.

    Owns the descriptors of the folder and of the current part. The first failed write or sync is
    final: nothing is written after a frame that may be torn, and a new incarnation must begin.
    """

    def __init__(
        self,
        folder: Path,
        job_id: str,
        incarnation: int,
        *,
        part_nbytes: int = _PART_NBYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.incarnation = incarnation
        self.history = History(folder, ())  # the valid part of earlier incarnations
        self.written_nbytes = 0  # size of all parts of this one
        self._job_id = job_id
        self._part_nbytes = part_nbytes
        self._clock = clock
        self._part = 0
        self._earlier: list[tuple[int, int, int]] = []  # parts, as in headers
        self._offset = 0
        self._descriptor = -1
        self._folder_fd = -1
        self._failure: LedgerError | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        job_id: str,
        *,
        part_nbytes: int = _PART_NBYTES,
        clock: Callable[[], float] = time.time,
    ) -> LedgerLog:
        """Begins the next incarnation of a ledger, which may be new. Raises LedgerError if existing
        files are damaged or cannot be written, or another writer took over."""
        incarnation, folder_fd, descriptor = _take_incarnation(folder)
        log = cls(folder, job_id, incarnation, part_nbytes=part_nbytes, clock=clock)
        log._folder_fd, log._descriptor = folder_fd, descriptor
        try:
            log.history = read_history(folder, before_incarnation=incarnation)
            _sync_last_incarnation(log.history)
            log._earlier += [part[1:] for part in log.history.parts]
            log._write_header()
        except BaseException:
            log.close()
            raise
        return log

    def __enter__(self) -> LedgerLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in (self._descriptor, self._folder_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._folder_fd = -1

    @property
    def path(self) -> Path:
        return self.folder / part_name(self.incarnation, self._part)

    def write(self, chunks: Sequence[bytes]) -> Position:
        """Writes batches as one frame and syncs it; returns the position after it. Raises
        LedgerError if that failed, or a later incarnation has begun; all later calls fail, too. The
        history then has the whole frame or nothing of it."""
        if self._failure is not None:
            raise LedgerError(str(self._failure)) from self._failure
        try:
            if self._offset >= self._part_nbytes:
                self._begin_part()
            self._write_frame(_compress(chunks))
        except OSError as error:
            self._fail(error)
        self._check_fence()
        return Position(self.incarnation, self._part, self._offset)

    def _begin_part(self) -> None:
        descriptor = _create(part_name(self.incarnation, self._part + 1), self._folder_fd)
        os.close(self._descriptor)
        self._earlier.append((self.incarnation, self._part, self._offset))
        self._descriptor, self._part, self._offset = descriptor, self._part + 1, 0
        self._write_header()
        os.fsync(self._folder_fd)

    def _write_header(self) -> None:
        header = Header(
            job_id=self._job_id,
            incarnation=self.incarnation,
            part=self._part,
            time_s=self._clock(),
            earlier=tuple(self._earlier),
        )
        try:
            self._write_frame(header.to_wire())
        except OSError as error:
            self._fail(error)
        self._check_fence()

    def _write_frame(self, payload: bytes) -> None:
        rest: list[bytes | memoryview] = [ledger_frames.head_of([payload], self._offset), payload]
        nbytes = sum(map(len, rest))
        while rest:
            num_written = os.writev(self._descriptor, rest)
            while rest and num_written >= len(rest[0]):
                num_written -= len(rest.pop(0))
            if num_written:
                rest[0] = memoryview(rest[0])[num_written:]
        os.fsync(self._descriptor)
        check_kept(self._descriptor)
        self._offset += nbytes
        self.written_nbytes += nbytes

    def _fail(self, error: OSError) -> NoReturn:
        # A torn frame stays: nothing follows it, so readers end the file there. Cutting it off
        # could remove bytes that an incarnation which is just beginning has counted as valid.
        self._failure = _describe(error, "write", self.path)
        raise self._failure from error

    def _check_fence(self) -> None:
        try:
            is_fenced = _exists(part_name(self.incarnation + 1, 0), self._folder_fd)
        except OSError as error:
            self._failure = _describe(error, "look into", self.folder)
            raise self._failure from error
        if is_fenced:
            self._failure = LedgerError(
                f"{self.folder}: incarnation {self.incarnation + 1} of this ledger has begun, so "
                f"incarnation {self.incarnation} must end: another rollout manager took over"
            )
            raise self._failure


def _compress(chunks: Sequence[bytes]) -> bytes:
    """The chunks as one payload. The interpreter's lock is free meanwhile."""
    compressor = zlib.compressobj(_LEVEL)
    return b"".join([*map(compressor.compress, chunks), compressor.flush()])


def _take_incarnation(folder: Path) -> tuple[int, int, int]:
    """Creates the next incarnation's first file; returns number, folder's and file's descriptor."""
    with ExitStack() as failing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for parent in (folder.parent.parent, folder.parent):
                sync(parent)
            folder_fd = os.open(folder, _FOLDER_FLAGS)
            failing.callback(os.close, folder_fd)
            newest = max(files_of(folder), default=0)
            for incarnation in range(newest + 1, newest + 1 + _MAX_TAKERS):
                with suppress(FileExistsError):
                    descriptor = _create(part_name(incarnation, 0), folder_fd)
                    os.fsync(folder_fd)
                    failing.pop_all()
                    return incarnation, folder_fd, descriptor
        except OSError as error:
            raise _describe(error, "write to", folder) from error
    raise LedgerError(
        f"{_MAX_TAKERS} other managers took over {folder} at once: check what starts managers"
    )


def _create(name: str, folder_fd: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(name, flags, 0o644, dir_fd=folder_fd)


def _exists(name: str, folder_fd: int) -> bool:
    """Asks the file server. Unless it opens the folder again (close-to-open consistency), an NFS
    client may answer from a cache that is up to a minute old."""
    reopened = os.open(".", _FOLDER_FLAGS, dir_fd=folder_fd)
    try:
        os.stat(name, dir_fd=reopened)
    except FileNotFoundError:
        return False
    finally:
        os.close(reopened)
    return True


def _sync_last_incarnation(history: History) -> None:
    """Syncs the last incarnation's files. It has synced all earlier ones when it began."""
    for part in history.parts[-1:]:
        try:
            sync(part.path)
        except OSError as error:
            raise _describe(error, "sync", part.path) from error


def _describe(error: OSError, what: str, path: Path) -> LedgerError:
    otherwise = ""
    if error.errno == errno.ENOENT:
        otherwise = _GONE if error.filename is not None else _LOST
    reason = explain(error, path, otherwise=otherwise)
    return LedgerError(f"cannot {what} {path}: {reason}")
