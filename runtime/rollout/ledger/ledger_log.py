"""Writing one life of a ledger.

Taking over, in this order: create the first file of the next life (O_EXCL), find what counts of
the earlier lives, sync it, write the header. A writer, after each sync, looks whether a next life
has a file, and acknowledges nothing if so. So what was acknowledged was there before the next life
looked: it is in every later history. No locks are needed, and none would hold on NFS.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

from umbra.runtime.disk import explain, sync
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

_PART_NBYTES: Final = 64 * 1024 * 1024
"""A part is ended beyond this. Larger parts cost memory when read; smaller ones make many files."""
_MAX_PIECES: Final = 512  # of one system call; Linux takes 1024
_MAX_TAKERS: Final = 16  # at the same moment
_GONE: Final = "; it was removed, or its file system is no longer mounted"


class LedgerLog:
    """The files of one life, open for writing. Blocking: lives in a thread.

    Owns the descriptor of the current part. The first failed write or sync is final: nothing is
    written behind what may be torn, and a new life has to begin.

    Attributes:
        history: what counts of earlier lives.
    """

    def __init__(
        self,
        folder: Path,
        job_id: str,
        life: int,
        *,
        part_nbytes: int = _PART_NBYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.life = life
        self.history = History(folder, ())
        self._job_id = job_id
        self._part_nbytes = part_nbytes
        self._clock = clock
        self._part = 0
        self._offset = 0
        self._descriptor = -1
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
        """Takes the next life of a ledger, which may be new.

        Raises:
            LedgerError: what is there is damaged or cannot be written, or another writer took
                over meanwhile.
        """
        life, descriptor = _take_life(folder)
        log = cls(folder, job_id, life, part_nbytes=part_nbytes, clock=clock)
        log._descriptor = descriptor
        try:
            log.history = read_history(folder, before_life=life)
            _sync_last_life(log.history)
            log._write_header([part[1:] for part in log.history.parts])
        except BaseException:
            log.close()
            raise
        return log

    def __enter__(self) -> LedgerLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def path(self) -> Path:
        """Of the current part."""
        return self.folder / part_name(self.life, self._part)

    def write(self, chunks: Sequence[bytes]) -> Position:
        """Writes batches as one frame and syncs; returns the position behind it.

        Raises:
            LedgerError: it could not be written, or a later life has begun; for all later calls
                too. The frame then counts or does not, as a whole.
        """
        if self._failure is not None:
            raise LedgerError(str(self._failure)) from self._failure
        try:
            if self._offset >= self._part_nbytes:
                self._begin_part()
            self._write_frame(chunks)
        except OSError as error:
            self._fail(error)
        self._check_fence()
        return Position(self.life, self._part, self._offset)

    def _begin_part(self) -> None:
        descriptor = _create(self.folder / part_name(self.life, self._part + 1))
        os.close(self._descriptor)
        self._descriptor, self._part, self._offset = descriptor, self._part + 1, 0
        self._write_header([])
        sync(self.folder)

    def _write_header(self, earlier: Sequence[tuple[int, int, int]]) -> None:
        header = Header(
            job_id=self._job_id,
            life=self.life,
            part=self._part,
            time_s=self._clock(),
            earlier=tuple(earlier),
        )
        try:
            self._write_frame([header.to_wire()])
        except OSError as error:
            self._fail(error)
        self._check_fence()

    def _write_frame(self, chunks: Sequence[bytes]) -> None:
        # gathered by the kernel: joining megabytes here would hold the interpreter's lock
        rest: list[bytes | memoryview] = [ledger_frames.head_of(chunks, self._offset), *chunks]
        nbytes = sum(map(len, rest))
        while rest:
            num_written = os.writev(self._descriptor, rest[:_MAX_PIECES])
            while rest and num_written >= len(rest[0]):
                num_written -= len(rest.pop(0))
            if num_written:
                rest[0] = memoryview(rest[0])[num_written:]
        os.fsync(self._descriptor)
        self._offset += nbytes

    def _fail(self, error: OSError) -> NoReturn:
        # What may be torn stays: nothing follows it, so readers see the end of the file there. To
        # cut it off could take bytes away that a life which begins just now has counted.
        self._failure = _describe(error, "write", self.path)
        raise self._failure from error

    def _check_fence(self) -> None:
        try:
            is_fenced = (self.folder / part_name(self.life + 1, 0)).exists()
        except OSError as error:
            self._failure = _describe(error, "look into", self.folder)
            raise self._failure from error
        if is_fenced:
            self._failure = LedgerError(
                f"{self.folder}: life {self.life + 1} of this ledger has begun, so life "
                f"{self.life} is over: another rollout manager took over, and this one must end"
            )
            raise self._failure


def _take_life(folder: Path) -> tuple[int, int]:
    """The next life's number and the descriptor of its first file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder.parent.parent, folder.parent):
            sync(parent)
        newest = max(files_of(folder), default=0)
        for life in range(newest + 1, newest + 1 + _MAX_TAKERS):
            with suppress(FileExistsError):
                descriptor = _create(folder / part_name(life, 0))
                sync(folder)
                return life, descriptor
    except OSError as error:
        raise _describe(error, "write to", folder) from error
    raise LedgerError(f"{_MAX_TAKERS} others took over {folder} at once: see who starts managers")


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _sync_last_life(history: History) -> None:
    """What the last life wrote and did not sync counts from now on, so it must be durable."""
    for part in history.parts:
        if part.life == history.end.life:
            try:
                sync(part.path)
            except OSError as error:
                raise _describe(error, "sync", part.path) from error


def _describe(error: OSError, what: str, path: Path) -> LedgerError:
    reason = explain(error, path, otherwise=_GONE if error.errno == errno.ENOENT else "")
    return LedgerError(f"cannot {what} {path}: {reason}")
