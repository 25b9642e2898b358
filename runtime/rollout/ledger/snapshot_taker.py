from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Self

from umbra.runtime.errors import ActorError, UmbraError
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.rollout.ledger.ledger_history import Position
from umbra.runtime.rollout.ledger.ledger_snapshot import largest_snapshot_nbytes

logger = logging.getLogger(__name__)

_PROGRAM: Final = "umbra.runtime.rollout.ledger.snapshot_process"
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
