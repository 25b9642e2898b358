"""Signals stop a run at a step boundary, or at once where waiting longer is pointless.

    first signal ──▶ `requested` is set; an `interruptible()` block (waiting for rollouts) ends
        │                 with StopRequested, and the ranks agree to stop at the next boundary
        ├─ second signal, at least a second later ──▶ StopNow in the main thread
        ├─ shutdown_grace_s later                 ──▶ StopNow in the main thread
        │     └─ and if even that does nothing    ──▶ the process ends
        └─ the other ranks are told, and do as if it had reached them too (`pass_in`)

torchrun passes a signal on to its ranks, and a terminal sends it to all of them too: what comes
within a second of the first is the same request. A rank that a signal reaches alone ends its wait
for rollouts and then waits for the others to agree, whose wait only the same request can end: so
they are told. Python runs handlers between bytecodes only, so a rank that hangs in a collective is
ended by a thread that the interpreter wakes in any case. And what a handler raises is lost where it
runs inside a destructor, so it is raised again and again.

The signals are SIGINT, SIGTERM and SIGHUP, which a closed terminal sends. A process that nohup
started ignores SIGHUP, and still does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_REQUEST_S: Final = 1.0
# From StopNow, which a call into C may hold up, to the end of the process.
_LAST_RESORT_S: Final = 2.0
# Between two attempts to end a wait that a signal is to end.
_AGAIN_S: Final = 0.5
# From another rank's signal to its news here, which takes milliseconds.
_NEWS_LIMIT_S: Final = 1.0


class StopRequested(Exception):
    """Raised inside `interruptible()` only."""

    def __init__(self) -> None:
        super().__init__("a signal asked this job to stop")


class StopNow(SystemExit):
    """Raised in the main thread wherever it is; carries 128 + the signal's number."""

    def __str__(self) -> str:
        assert isinstance(self.code, int)
        return f"it was told to stop ({signal.Signals(self.code - 128).name})"


class StopSignals:
    """Handles these signals while entered; restores the former handlers on exit. Main thread only.

    Until `defer()` is called there is nothing to save, and a signal ends the process at once.
    Owns the thread of the last resort.
    """

    def __init__(self, grace_s: float) -> None:
        self.received: signal.Signals | None = None
        self._grace_s = grace_s
        self._is_deferring = False
        self._is_interruptible = False
        self._received_at = 0.0
        self._passed_in: signal.Signals | None = None
        self._tell: Callable[[signal.Signals], None] | None = None
        self._main_thread = 0
        self._stack = contextlib.ExitStack()
        self._disarmed = threading.Event()

    def __enter__(self) -> Self:
        self._main_thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            self._watch_wakeups(stack)
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            former = signal.signal(signal.SIGALRM, self._on_alarm)
            stack.callback(signal.signal, signal.SIGALRM, former)
            stack.callback(self.disarm)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def disarm(self) -> None:
        """Nothing is left that a deadline should cut short."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._disarmed.set()

    def _watch_wakeups(self, stack: contextlib.ExitStack) -> None:
        """Starts the last resort: the interpreter writes a signal's number to a socket at once."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(
            target=self._last_resort, args=(reader,), name="umbra-signals", daemon=True
        )
        thread.start()
        stack.callback(reader.close)
        stack.callback(thread.join)
        stack.callback(writer.close)
        former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, former)

    def _last_resort(self, reader: socket.socket) -> None:
        """Runs on its own thread until the writing end is closed."""
        while data := reader.recv(1):
            number = data[0] if data[0] in _SIGNALS else self._passed_in
            if number is not None:
                grace_s = self._grace_s if self._is_deferring else 0.0
                if not self._disarmed.wait(grace_s + _LAST_RESORT_S):
                    os._exit(128 + number)
                return

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.received is not None

    @property
    def name(self) -> str:
        """The signal's name, or ""."""
        return self.received.name if self.received is not None else ""

    def defer(self, tell: Callable[[signal.Signals], None] | None = None) -> None:
        """From now on a first signal waits for the step boundary.

        Args:
            tell: passes it on to the other ranks. Called in the handler: returns at once and
                raises nothing.
        """
        self._tell = tell
        self._is_deferring = True

    def pass_in(self, number: int) -> None:
        """Another rank got this signal. Called on any thread, while this is entered.

        It is no second request, whenever it comes: the main thread learns of it by SIGALRM.
        """
        self._passed_in = signal.Signals(number)
        signal.pthread_kill(self._main_thread, signal.SIGALRM)

    @contextmanager
    def interruptible(self, *consequences: type[Exception]) -> Generator[None]:
        """A wait that a signal may end, with StopRequested.

        Args:
            consequences: what a wait of this rank ends with where a signal ends another's. Its
                news may come after them, so they are raised where there are none for a moment.
        """
        try:
            with self._interruptible():
                yield
        except consequences:
            with self._interruptible():
                time.sleep(_NEWS_LIMIT_S)
            raise

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        self._is_interruptible = True  # before the question: a signal may come in between
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._is_interruptible = False

    @contextmanager
    def uninterruptible(self) -> Generator[None]:
        """What must not be left half done inside an `interruptible()` block: StopRequested waits
        for its end."""
        former, self._is_interruptible = self._is_interruptible, False
        try:
            yield
        finally:
            self._is_interruptible = former

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self._begin(signal.Signals(number))
        elif time.monotonic() - self._received_at >= _SAME_REQUEST_S:
            self._stop_now()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            if self._passed_in is not None:
                self._begin(self._passed_in)
        elif time.monotonic() - self._received_at >= self._grace_s:
            self._stop_now()
        elif self._is_interruptible:
            raise StopRequested

    def _begin(self, received: signal.Signals) -> None:
        self.received = received
        self._received_at = time.monotonic()
        if not self._is_deferring:
            self._stop_now()
        if self._tell is not None and self._passed_in is None:
            self._tell(received)
        signal.setitimer(signal.ITIMER_REAL, min(_AGAIN_S, self._grace_s), _AGAIN_S)
        if self._is_interruptible:
            raise StopRequested

    def _stop_now(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # what cleans up now is not to be interrupted
        raise StopNow(128 + int(self.received or signal.SIGTERM))
