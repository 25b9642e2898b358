"""The ledger's asyncio interface: appends that never wait, and waiting until they are durable.

A caller that appends without waiting must check `has_capacity` first. `on_progress` reports when to
check again.

loop                                  thread "ledger"
append(...) -> ticket 1  ─ queue ─►   waits for `flush_s` or for a caller of `durable`
append(...) -> ticket 2  ─ queue ─►   writes both as one frame, syncs
await durable(2)         ◄─ durable up to 2 ─
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, NewType

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Event, encode_batches
from umbra.runtime.rollout.ledger.ledger_history import Position
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.waiting import Alarm

logger = logging.getLogger(__name__)

Ticket = NewType("Ticket", int)

_FLUSH_NBYTES: Final = 4 * 1024 * 1024
"""Size limit of a frame's batches. Larger delays callers of `durable`; smaller syncs more often."""
_QUEUED_MAX_NBYTES: Final = 64 * 1024 * 1024
"""Larger takes more memory and time; smaller stops admission at every hiccup of the disk."""
_STALL_TIMEOUT_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 60.0


class _Waiter(NamedTuple):
    ticket: int
    done: asyncio.Future[None]
    timeout_s: float  # limit without any progress
    timeout: asyncio.Timeout


class LedgerWriter:
    """Appends events from one event loop. An async context manager.

    Owns the log and one thread. The thread closes the log when everything appended is durable, and
    is joined on exit. After the first failure every call raises LedgerError; durable events stay.

    Args:
        flush_s: longest time that an append stays in memory if nobody waits for it.
        max_queued_nbytes: size of the queue at which `has_capacity` becomes False. Appends
            are still accepted.
        stall_timeout_s: the writer fails if the queue stays full for this long without progress.
        on_progress: called after each frame that is on disk, and after the failure.
    """

    def __init__(
        self,
        log: LedgerLog,
        *,
        flush_s: float = 0.1,
        max_queued_nbytes: int = _QUEUED_MAX_NBYTES,
        stall_timeout_s: float = _STALL_TIMEOUT_S,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = log
        self._flush_s = flush_s
        self._max_queued_nbytes = max_queued_nbytes
        self._on_progress = on_progress
        self._stalled = Alarm(stall_timeout_s, self._on_stalled)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)
        # Used by the loop only.
        self._appended = 0
        self._durable = 0
        self._position = Position(log.incarnation, 0, 0)
        self._queued_nbytes = 0
        self._waiters: list[_Waiter] = []
        self._failure: LedgerError | None = None
        self._ended = asyncio.Event()
        # Used by loop and thread, under the condition.
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._taken = 0
        self._requested = 0
        self._is_closing = False

    async def __aenter__(self) -> LedgerWriter:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stalled.watch(False)
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            self._failure = LedgerError(
                f"{self._log.path}: not written within {_CLOSE_TIMEOUT_S:g} s at the end: "
                "does the file system respond?"
            )
        else:
            self._thread.join()
        if self._failure is not None:
            if error is None:
                raise LedgerError(str(self._failure)) from self._failure
            logger.error("closing the ledger failed: %s", self._failure)

    @property
    def position(self) -> Position:
        """The position after the last durable frame; checkpoints store it."""
        return self._position

    @property
    def queued_nbytes(self) -> int:
        return self._queued_nbytes

    @property
    def written_nbytes(self) -> int:
        return self._log.written_nbytes

    @property
    def has_capacity(self) -> bool:
        return self._queued_nbytes < self._max_queued_nbytes

    @property
    def failure(self) -> LedgerError | None:
        return self._failure

    def append(self, *events: Event) -> Ticket:
        """Queues events. After a crash, the ledger has all of them but some at the end."""
        self._check()
        batches = encode_batches(time.time(), events)
        self._appended += len(batches)
        self._queued_nbytes += sum(map(len, batches))
        self._stalled.watch(not self.has_capacity)
        with self._changed:
            # On an empty queue the thread sleeps without a deadline, otherwise with one.
            if not self._queue or self._queued_nbytes > _FLUSH_NBYTES:
                self._changed.notify()
            self._queue += batches
        return Ticket(self._appended)

    async def durable(self, ticket: Ticket, timeout_s: float) -> None:
        """Returns when everything up to `ticket` is on disk; makes the thread flush at once. Raises
        LedgerError if it could not be written, or nothing was written for `timeout_s`."""
        self._check_ticket(ticket)
        if ticket <= self._durable:
            return
        self._check()
        with self._changed:
            self._requested = max(self._requested, ticket)
            self._changed.notify()
        done: asyncio.Future[None] = self._running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                self._waiters.append(_Waiter(ticket, done, timeout_s, timeout))
                await done
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "use `async with`"
        return self._loop

    def _check(self) -> None:
        if self._failure is not None:
            raise LedgerError(str(self._failure)) from self._failure
        assert self._loop is not None, "use `async with`"
        if self._is_closing:
            raise LedgerError(f"{self._log.folder}: this writer is closed")

    def _check_ticket(self, ticket: Ticket) -> None:
        if not 0 < ticket <= self._appended:
            raise ValueError(f"ticket {ticket} is unknown: {self._appended} were issued")

    def _on_durable(self, ticket: int, nbytes: int, position: Position) -> None:
        self._durable = ticket
        self._queued_nbytes -= nbytes
        self._position = position
        waiters = [waiter for waiter in self._waiters if not waiter.done.done()]
        self._waiters = [waiter for waiter in waiters if waiter.ticket > ticket]
        now = self._running_loop().time()
        for waiter in self._waiters:
            waiter.timeout.reschedule(now + waiter.timeout_s)
        for waiter in waiters:
            if waiter.ticket <= ticket:
                waiter.done.set_result(None)
        self._stalled.watch(False)
        self._stalled.watch(not self.has_capacity and not self._is_closing)
        self._on_progress()

    def _on_failure(self, error: LedgerError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._stalled.watch(False)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done.done():
                waiter.done.set_exception(LedgerError(str(error)))
        self._on_progress()

    def _on_stalled(self) -> None:
        self._on_failure(self._silence(self._stalled.delay_s))

    def _silence(self, timeout_s: float) -> LedgerError:
        return LedgerError(
            f"{self._log.path}: {self._queued_nbytes} bytes wait to be written, and none was for "
            f"{timeout_s:g} s: is the file system overloaded, or its server unreachable?"
        )

    def _write_all(self) -> None:
        """Runs in the thread: writes the queue, until closed and empty, or failed."""
        flushed = time.monotonic() - self._flush_s
        try:
            while chunks := self._take(flushed + self._flush_s):
                flushed = time.monotonic()
                position = self._log.write(chunks)
                self._call_on_loop(self._on_durable, self._taken, sum(map(len, chunks)), position)
        except LedgerError as error:
            self._call_on_loop(self._on_failure, error)
        except Exception as error:  # noqa: BLE001 - the waiters must get any error
            self._call_on_loop(
                self._on_failure, LedgerError(f"the ledger's thread failed: {error!r}")
            )
        finally:
            self._log.close()
            self._call_on_loop(self._ended.set)

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop stopped waiting and is closed
            self._running_loop().call_soon_threadsafe(callback, *arguments)

    def _take(self, not_before: float) -> list[bytes]:
        """Waits for the batches of the next frame; empty at the end."""
        with self._changed:
            while not self._queue and not self._is_closing:
                self._changed.wait()
            while not self._is_due():
                left_s = not_before - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            chunks: list[bytes] = []
            nbytes = 0
            while self._queue and (not chunks or nbytes + len(self._queue[0]) <= _FLUSH_NBYTES):
                chunks.append(self._queue.popleft())
                nbytes += len(chunks[-1])
            self._taken += len(chunks)
            return chunks

    def _is_due(self) -> bool:
        return (
            self._is_closing or self._requested > self._taken or self._queued_nbytes > _FLUSH_NBYTES
        )
