from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Self

from umbra.runtime.errors import ActorError, LedgerError, UmbraError
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.rollout.ledger.ledger_history import (
    History,
    Position,
    extend_history,
    read_history,
)
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.ledger_snapshot import (
    LedgerContent,
    first_needed,
    largest_snapshot_nbytes,
    read_content,
    take_snapshot,
)

logger = logging.getLogger(__name__)

_PROGRAM: Final = __name__
_TIMEOUT_S: Final = 600.0
_MAX_DUE: Final = 4


class SnapshotTaker:
    """Decides when a ledger needs a snapshot. An async context manager; owns the process that takes
    them, one at a time, from the first one on.

    The log may grow meanwhile; `is_behind` says when it has to wait. A snapshot that fails costs
    the next start time, and is logged; another process tries the next one, when as much was
    written again.

    Args:
        keep_nbytes: size of the newest part of the log, which stays whatever else is removed.
        on_taken: called when `is_behind` may have ended.

    Attributes:
        tail_nbytes: size of the log behind the last snapshot at which the next one is due; at least
            twice that of the snapshots. A manager that starts reads it in a second. Less takes more
            of a processor while the job runs.
        tail_steps: optimizer steps after which one is due in any case.
        checkpoints: steps of those that the job may resume from; None if they are unknown.
    """

    tail_nbytes = 24 * 1024 * 1024
    tail_steps = 200

    def __init__(
        self,
        folder: Path,
        keep_nbytes: float = math.inf,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        self.checkpoints: Collection[int] | None = None
        self._folder = folder
        self._keep_nbytes = keep_nbytes
        self._on_taken = on_taken
        self._is_taking = False
        self._taken = (0, 0)  # bytes of the log and steps at the last snapshot
        self._now = (0, 0)
        self._position: Position | None = None
        self._changed = asyncio.Event()
        self._process: tuple[ChildProcess, socket.socket] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end_process()

    @property
    def is_behind(self) -> bool:
        """Whether several snapshots are due: a starting manager would read much of the log."""
        return self._is_taking and self._num_due() >= _MAX_DUE

    def begin(self, nbytes: int, steps_done: int) -> None:
        """Takes the size of the log behind the last snapshot, and that one's steps."""
        self._taken = self._now[0] - nbytes, steps_done

    def observe(self, position: Position, nbytes: int, steps_done: int) -> None:
        """The log is durable up to `position`, `nbytes` since the process began."""
        self._position, self._now = position, (nbytes, steps_done)
        if self._num_due() >= 1:
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.take_if_due()

    async def take_if_due(self) -> None:
        """Returns when it is taken, or failed."""
        if self._num_due() >= 1:
            self._taken, self._is_taking = self._now, True
            try:
                await self._take()
            finally:
                self._is_taking = False
            self._on_taken()

    def _num_due(self) -> float:
        """The log behind the last snapshot, as a multiple of the size that makes one due."""
        nbytes, steps = (now - taken for now, taken in zip(self._now, self._taken, strict=True))
        return max(nbytes / self.tail_nbytes, steps / self.tail_steps)

    async def _take(self) -> None:
        known = self.checkpoints
        steps = "unknown" if known is None else ",".join(map(str, known))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._order(f"{self._position} {steps}\n")
            largest_nbytes = await asyncio.to_thread(largest_snapshot_nbytes, self._folder)
            self.tail_nbytes = max(self.tail_nbytes, 2 * largest_nbytes)
        except (UmbraError, OSError, TimeoutError) as error:
            logger.warning("no snapshot of the ledger was taken: %r", error)
            await self._end_process()

    async def _order(self, line: str) -> None:
        loop = asyncio.get_running_loop()
        if self._process is not None and self._process[0].has_ended():
            await self._end_process()
        child, connection = self._process = self._process or self._spawn()
        await loop.sock_sendall(connection, line.encode())
        if not await loop.sock_recv(connection, 1):
            raise ActorError(f"{child.name} (pid {child.pid}) {await child.wait()}")

    def _spawn(self) -> tuple[ChildProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            number = theirs.fileno()
            argv = [sys.executable, "-m", _PROGRAM, str(self._folder), str(self._keep_nbytes)]
            child = ChildProcess.spawn("snapshots", [*argv, str(number)], pass_fds=[number])
        return child, ours

    async def _end_process(self) -> None:
        if self._process is not None:
            child, connection = self._process
            self._process = None
            connection.close()
            await child.terminate(grace_s=0)


_EXTRA_PARTS: Final = 2
"""Parts that are removed at once besides as many as were written. More delay the next snapshot;
fewer take longer to remove what a lower limit no longer keeps."""


class SnapshotProcess:
    """The program's part: `python -m ... FOLDER KEEP_NBYTES DESCRIPTOR`.

    The descriptor is a socket. The process gets a line `POSITION STEPS` for each snapshot, and
    sends an empty one when it is done. STEPS are those of the checkpoints, such as `20,40`, or
    `unknown`. It also writes the index, so that readers need not, and removes the log's oldest
    parts. It reads each byte of the log's end once for the snapshots and once for the index. It
    ends with the socket's other end, or with an error; its successor reads the last snapshot.
    """

    def __init__(self, folder: Path, keep_nbytes: float) -> None:
        self._folder = folder
        self._keep_nbytes = keep_nbytes
        self._history = History(folder, ())
        self._content: LedgerContent | None = None
        self._index: LedgerIndex | None = None
        self._num_parts = 0

    def take(self, position: Position, checkpoints: list[int] | None) -> None:
        self._history = extend_history(self._history) or read_history(self._folder)
        if not self._history.covers(position):
            end = self._history.end
            raise LedgerError(f"the log ends at {end}: another rollout manager took over")
        history = self._history.until(position)
        taken = take_snapshot(history, checkpoints, self._content)
        content = read_content(history)  # without the samples that were done
        # One of an older snapshot would be taken for the state there: the next take reads it again.
        self._content = content if content.snapshot == taken else None
        if self._index is None:
            self._index, self._num_parts = LedgerIndex(self._folder), len(history.parts)
        self._index.refresh()
        self._index.write()
        max_parts = len(history.parts) - self._num_parts + _EXTRA_PARTS
        self._num_parts = len(history.parts)
        needed = first_needed(history, checkpoints)
        self._index.remove_oldest(self._keep_nbytes, needed, max_parts)


def main(folder: str, keep_nbytes: str, descriptor: str) -> int:
    process = SnapshotProcess(Path(folder), float(keep_nbytes))
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile() as orders:
        for order in orders:
            position, steps = order.split(" ")
            checkpoints = None
            if steps != "unknown\n":
                checkpoints = [int(step) for step in steps.strip().split(",") if step]
            try:
                process.take(Position.parse(position), checkpoints)
            except (LedgerError, OSError) as error:
                print(f"no snapshot, or no index, at {position}: {error}", file=sys.stderr)
                return 1
            connection.sendall(b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
