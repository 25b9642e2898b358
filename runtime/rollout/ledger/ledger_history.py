"""The files of one manager's ledger, and which of their bytes are its history.

    RUN_DIR/ledger/MANAGER/000001-0000.log     incarnation 1, part 0
                           000001-0001.log
                           000002-0000.log     incarnation 2 of the manager

The first frame of a file is a header; the others are compressed by zlib. The header lists every
earlier file with its valid length at that time. Bytes that an older incarnation wrote later (its
process was stopped and continued) are not part of the history. The newest file with a header
decides; the oldest ones may have been removed (`index_part.py`). Reading raises LedgerError
for files that are damaged, truncated, missing or of another format.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgpack

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger import ledger_frames
from umbra.runtime.rollout.ledger.ledger_events import Batch, decode_batches

T = TypeVar("T")

FORMAT: Final = 2
_NAME: Final = re.compile(r"(\d{6,})-(\d{4,})\.log")
_POSITION: Final = re.compile(r"(\d+)-(\d+)-(\d+)")


class Position(NamedTuple):
    """A position in a ledger; later ones are greater."""

    incarnation: int
    part: int
    offset: int

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.part}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """The inverse of `str()`. Raises LedgerError for other text."""
        match = _POSITION.fullmatch(text)
        if match is None:
            raise LedgerError(f"{text!r} is not a ledger position (INCARNATION-PART-OFFSET)")
        return cls(*map(int, match.groups()))


BEGIN: Final = Position(0, 0, 0)


class LogPart(NamedTuple):
    """One file, of which the first `stop` bytes are valid."""

    path: Path
    incarnation: int
    part: int
    stop: int


class Entry(NamedTuple):
    position: Position  # where its frame begins
    end: int  # byte of its part after the frame
    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first frame of a file. `earlier`: (incarnation, part, stop) of all earlier files."""

    job_id: str
    incarnation: int
    part: int
    time_s: float
    earlier: tuple[tuple[int, int, int], ...] = ()

    def to_wire(self) -> bytes:
        content = [FORMAT, self.job_id, self.incarnation, self.part, self.time_s, self.earlier]
        data: bytes = msgpack.packb(content)
        return data

    @classmethod
    def from_wire(cls, payload: bytes | memoryview, path: Path) -> Header:
        """Raises LedgerError if the header belongs to another file, or has another format."""
        try:
            found, *content = msgpack.unpackb(payload)
            if found != FORMAT:
                raise LedgerError(
                    f"{path} has format {found}, and this umbra reads format {FORMAT}: use the "
                    "version of umbra that wrote it"
                )
            job_id, incarnation, part, time_s, earlier = content
            header = cls(
                job_id=str(job_id),
                incarnation=int(incarnation),
                part=int(part),
                time_s=float(time_s),
                earlier=tuple((int(a), int(b), int(c)) for a, b, c in earlier),
            )
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise LedgerError(f"{path} has no valid header: {error}") from error
        if path.name != part_name(header.incarnation, header.part):
            raise LedgerError(
                f"{path} was written as {part_name(header.incarnation, header.part)}: rename the "
                "files of this folder back"
            )
        return header


@dataclass(frozen=True, slots=True)
class History:
    """The valid part of a ledger when it was read; later writes do not change it. The parts are in
    order; those of the last incarnation are at the end."""

    folder: Path
    parts: tuple[LogPart, ...]

    @property
    def end(self) -> Position:
        if not self.parts:
            return BEGIN
        return Position(*self.parts[-1][1:])

    def covers(self, position: Position) -> bool:
        """Whether the history includes everything written before this position."""
        return any(
            (part.incarnation, part.part) == position[:2] and position.offset <= part.stop
            for part in self.parts
        )

    def until(self, position: Position) -> History:
        """The history up to a position that it covers."""
        parts = [part for part in self.parts if (part.incarnation, part.part) <= position[:2]]
        return History(self.folder, (*parts[:-1], parts[-1]._replace(stop=position.offset)))

    def nbytes_after(self, position: Position) -> int:
        later = [part for part in self.parts if (part.incarnation, part.part) >= position[:2]]
        return sum(part.stop for part in later) - position.offset

    def header_at(self, position: Position) -> Header:
        return header_of(self.folder / part_name(*position[:2]))

    def entries(self, start: Position = BEGIN, stop: Position | None = None) -> Iterator[Entry]:
        """Every batch, in order. `start` and `stop` are beginnings of frames."""
        for position, end, payload in _one_ahead(self._frames(start, stop)):
            try:
                for batch in decode_batches(payload):
                    yield Entry(position, end, batch)
            except LedgerError as error:
                path = self.folder / part_name(*position[:2])
                raise LedgerError(f"{path}, frame at byte {position.offset}: {error}") from error

    def _frames(
        self, start: Position, stop: Position | None
    ) -> Iterator[tuple[Position, int, bytes]]:
        """Every frame as in `entries`: where it begins, the byte after it, and its payload."""
        for part in self.parts:
            number = (part.incarnation, part.part)
            if number < start[:2] or (stop is not None and number > stop[:2]):
                continue
            if stop is not None and number == stop[:2]:
                part = part._replace(stop=stop.offset)
            for offset, payload in _scan(part, start.offset * (number == start[:2])).frames:
                if offset:  # not the header
                    end = offset + ledger_frames.HEAD_NBYTES + len(payload)
                    yield Position(*number, offset), end, zlib.decompress(payload)


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items; a thread makes the next one while the caller has the last."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def ledger_folder(run_dir: Path, manager: str) -> Path:
    return run_dir / "ledger" / manager


def managers_of(run_dir: Path) -> list[str]:
    """Managers with a ledger in this run directory, sorted. Raises OSError if it cannot be read."""
    try:
        found = sorted(entry.name for entry in (run_dir / "ledger").iterdir() if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in found if files_of(ledger_folder(run_dir, name))]


def kept_path(log: Path) -> Path:
    """The path of the remains of a part whose log is removed, besides its index."""
    return log.with_suffix(".kept")


def part_name(incarnation: int, part: int) -> str:
    return f"{incarnation:06}-{part:04}.log"


def files_of(folder: Path) -> dict[int, dict[int, Path]]:
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return found


def read_history(folder: Path, *, before_incarnation: int | None = None) -> History:
    """Finds the valid files, even while a writer is active. Later incarnations may be excluded."""
    try:
        files = files_of(folder)
    except OSError as error:
        raise LedgerError(f"cannot list {folder}: {error.strerror}") from error
    for incarnation in sorted(files, reverse=True):
        if before_incarnation is not None and incarnation >= before_incarnation:
            continue
        for part in sorted(files[incarnation], reverse=True):
            path = files[incarnation][part]
            if stop := ledger_frames.scan(_read(path), path).stop:
                parts = [*header_of(path).earlier, (incarnation, part, stop)]
                return History(
                    folder, tuple(LogPart(folder / part_name(*p[:2]), *p) for p in parts)
                )
    return History(folder, ())


def extend_history(history: History) -> History | None:
    """The ledger as it is now; reads only the bytes written since. None if it has a new incarnation
    or no header yet, or the last part was removed: `read_history` must read it from scratch."""
    files = files_of(history.folder)
    newest = max(files, default=0)
    if not history.parts or newest != history.end.incarnation:
        return None
    *parts, last = history.parts
    if last.part not in files[newest]:
        return None
    for number in range(last.part, max(files[newest]) + 1):
        path = history.folder / part_name(newest, number)
        start = last.stop if number == last.part else 0
        found = ledger_frames.scan(_read(path, start), path, start)
        parts.append(LogPart(path, newest, number, found.stop))
    return History(history.folder, tuple(parts))


def header_of(path: Path) -> Header:
    try:
        payload = ledger_frames.read_first(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if payload is None:
        raise LedgerError(f"{path} is damaged at byte 0: restore it from a backup")
    return Header.from_wire(payload, path)


def _scan(part: LogPart, start: int = 0) -> ledger_frames.Scan:
    """The frames of a part from `start` on; all its valid bytes must be good frames."""
    found = ledger_frames.scan(_read(part.path, start, part.stop - start), part.path, start)
    if found.stop != part.stop:
        header_of(part.path)  # of another part, if files were renamed
        raise LedgerError(
            f"{part.path} is damaged: {part.stop} bytes of it were good, and now only "
            f"{found.stop} are; restore it from a backup"
        )
    return found


def _read(path: Path, start: int = 0, nbytes: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(nbytes)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> LedgerError:
    if isinstance(error, FileNotFoundError) and kept_path(path).exists():
        return LedgerError(
            f"{path} was removed, because rollout.ledger_gb limits the ledger and no checkpoint "
            "needed it: resume from a checkpoint, or begin a new run, in another run.dir or with "
            "run.resume=never run.overwrite=true"
        )
    return LedgerError(f"cannot read {path}: {error.strerror}")
