"""The progress of a sync in shared memory: ranks and engines notify each other, bucket by bucket.

A message through the supervisor takes milliseconds on busy cores, longer than copying a bucket that
stays in the cache. So the control block of a sync, a memfd of its own, holds 32-bit words, each
written by one process only:

    word                written by      means
    abort               supervisor      1: the sync was aborted
    filled[rank]        that rank       buckets it has filled, in the name of a rank of another
                                        node the receiver of this one
    loaded[engine]      that engine     buckets loaded; while it waits for ranks, the buckets
                                        available, so that the watchdog spares it
    stopped[engine]     that engine     1: its workers, which are other processes, stop waiting

Engines wait for ranks, but no rank waits for an engine here: nothing is filled twice in a sync.
Each sync has a new control block, so a process that is late from an earlier sync disturbs none.
Every wait consists of short ones: a missed wake costs one of these. Torch-free.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

from umbra.runtime.errors import DeadlineExceeded, WeightSyncError
from umbra.runtime.process.host_memory import create_memory, map_memory, unmap
from umbra.runtime.weights.image.fd_server import received_fd

_WORD_NBYTES: Final = 4
_STRIDE: Final = 16  # words: each one has a cache line of its own
_LONGEST_WAIT_S: Final = 0.05
_SPIN_S: Final = 0.001
# A wait begins with this much polling, which lets other threads run: a thread that only sleeps is
# woken on the core of its waker, and then the two copy in turn instead of at once.

_MACHINE: Final = platform.machine()
_SYS_FUTEX: Final = 202 if _MACHINE == "x86_64" else 98  # 98: every newer architecture
_FUTEX_WAIT: Final = 0  # not the private kind, which only works between threads
_FUTEX_WAKE: Final = 1
_EVERYBODY: Final = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
)


def _nothing() -> None:
    """Default of `while_waiting`: only the control block ends the wait."""


class SyncProgress:
    """One mapped control block, from a zeroed memfd of `nbytes_needed`. Owns the
    mapping, not `fd`."""

    def __init__(self, fd: int, num_ranks: int, num_engines: int) -> None:
        self._num_ranks = num_ranks
        self._num_engines = num_engines
        nbytes = self.nbytes_needed(num_ranks, num_engines)
        self._mapping = map_memory(fd, nbytes)
        array = ctypes.c_uint32 * (nbytes // _WORD_NBYTES)
        # An aligned word is read and written in one access.
        self._words: ctypes.Array[ctypes.c_uint32] = array.from_buffer(self._mapping)

    @classmethod
    def create(cls, name: str, num_ranks: int, num_engines: int) -> tuple[int, Self]:
        """Returns the new block's descriptor, which the caller owns, and its mapping."""
        fd = create_memory(name, cls.nbytes_needed(num_ranks, num_engines))
        try:
            return fd, cls(fd, num_ranks, num_engines)
        except WeightSyncError:
            os.close(fd)
            raise

    @classmethod
    def receive(cls, socket_path: str, wire: Mapping[str, Any], timeout_s: float) -> Self:
        """Maps the block of `wire`: {"name", "num_ranks", "num_engines"}.

        Raises like `received_fd`.
        """
        with received_fd(socket_path, wire["name"], timeout_s) as fd:
            return cls(fd, wire["num_ranks"], wire["num_engines"])

    @classmethod
    def receive_open(
        cls, socket_path: str, wire: Mapping[str, Any], timeout_s: float
    ) -> Self | None:
        """`receive`; None if the block is no longer offered, because the sync was aborted."""
        try:
            return cls.receive(socket_path, wire, timeout_s)
        except WeightSyncError:
            return None

    @staticmethod
    def nbytes_needed(num_ranks: int, num_engines: int) -> int:
        return (1 + num_ranks + 2 * num_engines) * _STRIDE * _WORD_NBYTES

    def close(self) -> None:
        """Unmaps the block. Idempotent. Other processes' writes are no longer seen: a waiting
        thread waits until its deadline, or until `while_waiting` ends it."""
        self._words = type(self._words)(*self._words)
        unmap(self._mapping)

    @property
    def is_aborted(self) -> bool:
        return self._words[0] != 0

    def set_filled(self, rank: int, num_buckets: int) -> None:
        """The buckets' contents are visible to every process that sees the number."""
        self._publish(self._filled(rank), num_buckets)

    def set_loaded(self, engine: int, num_buckets: int) -> None:
        """The engine has loaded this many buckets, or cannot use them without the next one."""
        self._words[self._loaded(engine)] = num_buckets

    def wait_filled(
        self, num_buckets: int, deadline: float, while_waiting: Callable[[], None] = _nothing
    ) -> bool:
        """Waits until every rank has filled this many buckets; returns False if the sync is
        aborted. `deadline` is on the clock of `time.monotonic`, and raises DeadlineExceeded.
        `while_waiting` is called about every 50 ms without progress; may raise."""
        for rank in range(self._num_ranks):
            word = self._filled(rank)
            if not self._wait(word, num_buckets, deadline, while_waiting):
                return False
        return True

    def see_filled(self) -> int:
        """Buckets that every rank has filled, with visible contents."""
        num_filled = min(self.num_filled())
        order(self._address(0))
        return num_filled

    def stop(self, engine: int) -> None:
        self._words[self._stopped(engine)] = 1

    def is_stopped(self, engine: int) -> bool:
        return self._words[self._stopped(engine)] != 0

    def abort(self) -> None:
        self._words[0] = 1
        for rank in range(self._num_ranks):
            wake(self._address(self._filled(rank)))

    def dismiss(self, engine: int) -> None:
        """Does nothing: no process waits for an engine here."""

    def num_filled(self) -> list[int]:
        return [self._words[self._filled(rank)] for rank in range(self._num_ranks)]

    def num_loaded(self, engine: int) -> int:
        return self._words[self._loaded(engine)]

    def has_work(self, engine: int) -> bool:
        return self.num_loaded(engine) < min(self.num_filled())

    def is_cut_off(self, engine: int) -> bool:
        """Never: no engine receives for others."""
        return False

    def _filled(self, rank: int) -> int:
        return (1 + rank) * _STRIDE

    def _loaded(self, engine: int) -> int:
        return (1 + self._num_ranks + engine) * _STRIDE

    def _stopped(self, engine: int) -> int:
        return (1 + self._num_ranks + self._num_engines + engine) * _STRIDE

    def _address(self, word: int) -> int:
        return ctypes.addressof(self._words) + word * _WORD_NBYTES

    def _publish(self, word: int, value: int) -> None:
        address = self._address(word)
        order(address)  # the data comes before the value that announces it
        self._words[word] = value
        wake(address)

    def _wait(
        self, word: int, least: int, deadline: float, while_waiting: Callable[[], None]
    ) -> bool:
        address = self._address(word)
        sleeps_from = time.monotonic() + _SPIN_S
        while not self.is_aborted:
            value = self._words[word]
            if value >= least:
                order(address)  # the data is read after the value
                return True
            now = time.monotonic()
            left_s = deadline - now
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{value} of at least {least} buckets are done and the time is used up"
                )
            if now < sleeps_from:
                os.sched_yield()
                continue
            wait(address, value, min(left_s, _LONGEST_WAIT_S))
            if self._words[word] == value:
                while_waiting()
        return False


class EngineEnd:
    """One engine's side of the control block. Blocks in `buckets`. Owns the mapping until `close`.

    Args:
        wire: the arguments of prepare_update: "fd_socket", and "progress" with the control
            block's name and sizes, the "engine" number of this engine and "timeout_s", the seconds
            left for the sync.
        counts: whether it reports loaded buckets; one of an engine's workers does.
    """

    def __init__(self, wire: Mapping[str, Any], timeout_s: float, *, counts: bool = True) -> None:
        progress: Mapping[str, Any] = wire["progress"]
        self._deadline = time.monotonic() + float(progress["timeout_s"])
        self._engine = int(progress["engine"])
        self._progress = SyncProgress.receive(wire["fd_socket"], progress, timeout_s)
        self._counts = counts
        self._is_stopped = False
        self._num_filled = 0  # as seen last
        self._num_published = 0
        self._awaited = 0
        self.num_loaded = 0

    def buckets(self, num_buckets: int) -> Iterator[int]:
        """Yields every bucket once all ranks have filled it. Raises WeightSyncError if the sync was
        aborted, its time is over, or `stop` was called."""
        if self.num_loaded:
            raise WeightSyncError("the buckets of this update were loaded before")
        for idx in range(num_buckets):
            self.wait_filled(idx + 1)
            yield idx

    def wait_filled(self, num_buckets: int) -> None:
        """Waits until all ranks have filled this many. Raises the errors of `buckets`."""
        if num_buckets <= self._num_filled and not self._progress.is_aborted:
            return
        self._awaited = num_buckets
        self._note_waiting()
        try:
            is_filled = self._progress.wait_filled(num_buckets, self._deadline, self._while_waiting)
        except DeadlineExceeded:
            raise WeightSyncError(
                f"bucket {num_buckets - 1} was not filled within the time of the sync"
            ) from None
        if not is_filled:
            raise WeightSyncError(
                f"the sync was aborted before bucket {num_buckets - 1} was filled"
            )
        self._num_filled = self._progress.see_filled()

    def set_loaded(self, num_buckets: int) -> None:
        self.num_loaded = num_buckets
        self._publish(num_buckets)

    def check_not_aborted(self) -> None:
        if self._progress.is_aborted:
            raise WeightSyncError("the sync was aborted before the model was loaded")

    def stop(self) -> None:
        """Ends `buckets` within 50 ms, in every process of the engine. From any thread."""
        self._progress.stop(self._engine)

    def close(self) -> None:
        """Stops own waits and unmaps the control block. Idempotent."""
        self._is_stopped = True
        self._progress.close()

    def _while_waiting(self) -> None:
        self._note_waiting()
        if self._is_stopped or self._progress.is_stopped(self._engine):
            raise WeightSyncError("the engine is being stopped")

    def _note_waiting(self) -> None:
        """Reports that the engine waits for more than the available buckets, if so."""
        num_filled = self._progress.see_filled()
        if num_filled < self._awaited:
            self._publish(num_filled)

    def _publish(self, num_buckets: int) -> None:
        if self._counts and num_buckets > self._num_published:
            self._num_published = num_buckets
            self._progress.set_loaded(self._engine, num_buckets)


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleeps while the word is `seen`, at most `timeout_s`; may return early without a reason.
    Other threads of the interpreter run meanwhile. A signal ends the wait, so its handler runs.

    Memory order. A writer stores data, then a word that announces it; a reader that sees the word
    must see the data. x86 keeps stores in order and loads in order, so nothing is needed there. On
    other machines both sides put a full barrier between the two (`order`): a FUTEX_WAKE, which has
    one in the kernel (`smp_mb` before it looks for waiters). `wait` loses no wake: the kernel
    compares and sleeps in one step.
    """
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen, ctypes.byref(timeout))


def wake(address: int) -> None:
    _libc.syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None)


def order(address: int) -> None:
    """Orders this thread's earlier reads and writes before its later ones."""
    if _MACHINE != "x86_64":
        wake(address)
