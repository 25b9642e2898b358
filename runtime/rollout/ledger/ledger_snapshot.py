"""Snapshots of a ledger's state, so that a manager need not read the whole log when it starts.

    RUN_DIR/ledger/MANAGER/000001-0003-41943096-120.snapshot

The name has the position in the log at which the state was taken, and the number of optimizer steps
done there. The file has that state without its settled groups, and a digest. It is written under
another name, synced, and then renamed, so that a crash leaves the older ones.

The log alone is the truth. A snapshot counts if the history of the log covers its position, because
the bytes before it never change. A damaged one is passed over with a warning. The job can go back
from a snapshot to checkpoints of at least its steps; for earlier ones, an older snapshot is read,
and the longer tail behind it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import xxhash

from umbra.runtime.disk import explain, replacing, sync
from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Restored
from umbra.runtime.rollout.ledger.ledger_history import BEGIN, Entry, History, Position
from umbra.runtime.rollout.ledger.ledger_state import LedgerState

logger = logging.getLogger(__name__)

FORMAT: Final = 3
_NAME: Final = re.compile(r"(\d{6,})-(\d{4,})-(\d+)-(\d+)\.snapshot")
_READ_NBYTES: Final = 1024 * 1024
_NUM_SPARE: Final = 2  # the newest snapshots, of which one may be damaged

Restores = list[tuple[Position, int]]
"""Where the job went back to checkpoints, and their steps, oldest first."""


class Snapshot(NamedTuple):
    """A file with the state at `position`, where `steps_done` optimizer steps were done."""

    position: Position
    steps_done: int
    path: Path

    def fits(self, restores: Restores) -> bool:
        """Whether the job has not gone back farther since than the snapshot allows."""
        return all(step >= self.steps_done for at, step in restores if at >= self.position)


@dataclass(frozen=True, slots=True)
class LedgerContent:
    """The state at the end of a history; `snapshot` is None if the whole log was read."""

    state: LedgerState
    restores: Restores
    snapshot: Snapshot | None


def read_content(history: History, restoring_step: int | None = None) -> LedgerContent:
    """Reads the newest snapshot that serves, and the log behind it. `restoring_step` is the step of
    the checkpoint that the caller will resume from, if any."""
    own = [] if restoring_step is None else [(history.end, restoring_step)]
    known: Restores | None = None  # looked for in the log only when needed
    snapshots = [*snapshots_of(history), None]
    while True:
        snapshot = next(s for s in snapshots if s is None or s.fits((known or []) + own))
        start = BEGIN if snapshot is None else snapshot.position
        try:
            state, earlier = (LedgerState(), []) if snapshot is None else _read(snapshot, history)
        except (OSError, LedgerError) as error:
            logger.warning("passing over a snapshot of the ledger: %s", error)
            snapshots.remove(snapshot)
            continue
        state.foresee([step for at, step in known or [] if at >= start], restoring_step)
        found = Restores()
        try:
            state.apply_all(_noting(history.entries(start), found))
        except LedgerError:
            found = [restore for entry in history.entries(start) for restore in _restores_in(entry)]
            if known is not None or not found:
                raise
            known = earlier + found  # they need samples that the snapshot has let go
            continue
        if known is None and found and restoring_step is not None:
            known = earlier + found  # the first of them was taken for the caller's own
            continue
        return LedgerContent(state, earlier + found, snapshot)


def _noting(entries: Iterable[Entry], found: Restores) -> Iterator[Entry]:
    for entry in entries:
        found += _restores_in(entry)
        yield entry


def _restores_in(entry: Entry) -> Restores:
    return [(entry.position, e.step) for e in entry.batch.events if isinstance(e, Restored)]


def take_snapshot(
    history: History, checkpoints: Collection[int] | None, last: LedgerContent | None = None
) -> Snapshot:
    """Writes the state at the end of a history, and removes snapshots that nothing needs any more.

    Args:
        checkpoints: steps that the job may resume from; None if they are unknown.
        last: as read from the last snapshot, and changed here. Without it, the newest one that
            serves is read.

    Raises LedgerError if the snapshot cannot be written.
    """
    content = read_content(history) if last is None else last
    state, position = content.state, history.end
    if last is not None and last.snapshot is not None:
        state.apply_all(_noting(history.entries(last.snapshot.position), last.restores))
    name = "{:06}-{:04}-{}-{}.snapshot".format(*position, state.steps_done)
    taken = Snapshot(position, state.steps_done, history.folder / name)
    try:
        _write(taken, content, history)
    except OSError as error:
        raise LedgerError(f"cannot write {taken.path}: {explain(error, taken.path)}") from error
    _remove_unneeded(taken, content, history, checkpoints)
    return taken


def _write(snapshot: Snapshot, content: LedgerContent, history: History) -> None:
    digest = xxhash.xxh3_128()
    head = [*_head(snapshot, history), content.restores]
    with replacing(snapshot.path) as file:
        for item in (head, *content.state.to_wire()):
            data: bytes = msgpack.packb(item)
            digest.update(data)
            file.write(data)
        file.write(digest.digest())
    sync(history.folder)


def _remove_unneeded(
    taken: Snapshot,
    content: LedgerContent,
    history: History,
    checkpoints: Collection[int] | None,
) -> None:
    usable = [snapshot for snapshot in snapshots_of(history) if snapshot.fits(content.restores)]
    if checkpoints is None:
        covered_step = content.state.covered_step
        checkpoints = {s.steps_done for s in usable if s.steps_done <= covered_step}
    needed = set(usable[:_NUM_SPARE])
    for step in checkpoints:
        needed.update([s for s in usable if s.steps_done <= step][:1])
    for snapshot in _all_in(history.folder):
        if snapshot.position <= taken.position and snapshot not in needed:
            snapshot.path.unlink(missing_ok=True)
    for path in history.folder.glob(".*.snapshot.*"):  # of a process that was killed
        path.unlink(missing_ok=True)


def first_needed(history: History, checkpoints: Collection[int] | None) -> Position:
    """Where a start of the manager may begin to read, from one of these checkpoints or none."""
    found = snapshots_of(history)
    if checkpoints is None or any(
        all(snapshot.steps_done > step for snapshot in found) for step in checkpoints
    ):
        return BEGIN
    return min((snapshot.position for snapshot in found), default=BEGIN)


def snapshots_of(history: History) -> list[Snapshot]:
    found = [snapshot for snapshot in _all_in(history.folder) if history.covers(snapshot.position)]
    return sorted(found, reverse=True)


def largest_snapshot_nbytes(folder: Path) -> int:
    return max((snapshot.path.stat().st_size for snapshot in _all_in(folder)), default=0)


def _all_in(folder: Path) -> Iterator[Snapshot]:
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise LedgerError(f"cannot list {folder}: {error.strerror}") from error
    for path in paths:
        if match := _NAME.fullmatch(path.name):
            *position, steps_done = map(int, match.groups())
            yield Snapshot(Position(*position), steps_done, path)


def _head(snapshot: Snapshot, history: History) -> list[Any]:
    """Tells the log from one of other content with the same position, such as a restored backup."""
    return [FORMAT, str(snapshot.position), history.header_at(snapshot.position).time_s]


def _read(snapshot: Snapshot, history: History) -> tuple[LedgerState, Restores]:
    digest = xxhash.xxh3_128()
    size = snapshot.path.stat().st_size - digest.digest_size
    with snapshot.path.open("rb") as file:
        for start in range(0, size, _READ_NBYTES):
            digest.update(file.read(min(_READ_NBYTES, size - start)))
        if size < 0 or file.read() != digest.digest():
            raise LedgerError(f"{snapshot.path} is damaged: its digest is not that of its content")
        file.seek(0)
        items: Any = msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=2**31 - 1)
        *head, restores = next(items)
        if head != _head(snapshot, history):
            raise LedgerError(f"{snapshot.path} is of another format or log: {head}")
        state = LedgerState.from_wire(items)
    return state, [(Position(*position), step) for position, step in restores]
