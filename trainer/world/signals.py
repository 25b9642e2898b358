"""Signals stop a run at a step boundary, or at once if waiting longer is pointless.

    first signal ──▶ `requested` is set; an `interruptible()` block (waiting for rollouts) ends
        │                 with StopRequested, and the ranks agree to stop at the next boundary
        ├─ second signal, at least a second later ──▶ StopNow in the main thread
        ├─ its grace later (SIGINT has no limit)  ──▶ StopNow in the main thread
        │     └─ if StopNow does not end it       ──▶ the process ends
        └─ it is passed on to the other ranks, which act as if they had got it (`pass_in`)

    `umbra stop`, `umbra preempt` ──▶ the supervisor passes SIGTERM or SIGUSR1 in, with a grace of
                                      its own, which no later SIGTERM shortens

torchrun passes a signal on to its ranks, and a terminal sends it to all of them, too: signals
within a second of the first are the same request. If a signal reaches only one rank, that rank ends
its wait for rollouts and then waits for the others to agree. Their waits only end by a signal, so
it is passed on. Python runs handlers between bytecodes only, so a thread that the interpreter wakes
in any case ends a rank that hangs in a collective. An exception from a handler is lost if the
handler runs inside a destructor, so it is raised repeatedly.

The signals are SIGINT, SIGTERM and SIGHUP, which a closed terminal sends. A process that nohup
started ignores SIGHUP, and still does.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn, Self

from umbra.runtime.cluster.run_requests import NOTHING_TO_SAVE, PREEMPT_SIGNAL, stop_status
from umbra.runtime.errors import JobFailed
from umbra.runtime.process.signal_handling import keep_from_forks
from umbra.trainer.world.stop_forecast import StopForecast

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_REQUEST_S: Final = 1.0
# Time from StopNow, which a call into C may delay, to the end of the process.
_LAST_RESORT_S: Final = 2.0
# Interval of attempts to end a wait after a signal.
_REPEAT_S: Final = 0.5
# Interval of attempts to make the main thread run its handler.
_WAKE_S: Final = 0.1
# Time for another rank's signal to be passed on to this one; it takes milliseconds.
_NEWS_LIMIT_S: Final = 1.0


class StopRequested(Exception):
    """A signal asked this job to stop. Raised inside `interruptible()` only."""


class StopNow(SystemExit):
    """Raised in the main thread, wherever it is; carries the signal's exit status."""

    def __init__(self, number: signal.Signals, why: str) -> None:
        super().__init__(stop_status(number))
        self._number = number
        self._why = why

    def __str__(self) -> str:
        return self._why

    def __reduce__(self) -> tuple[Any, ...]:
        """torch carries a rank's error to the others as a pickle, from a checkpoint's load."""
        return type(self), (self._number, self._why), self.__dict__

    @staticmethod
    def is_cause_of(failure: JobFailed) -> bool:
        """Whether another rank ended so, and the session reported that as its failure."""
        return f" failed: {StopNow.__name__}: " in str(failure)


class StopSignals:
    """Handles stop signals while entered; restores former handlers on exit. Main thread only. After
    a stop, it leaves signals ignored: the process is ending, and torchrun signals the ranks that
    end a moment later than the first.

    Until `defer()` is called there is nothing to save, and a signal ends the process at once. Owns
    the thread that ends the process as a last resort, `grace_s` after a signal where no forecast
    gives another time; `on_last_resort` reports it on that thread.
    """

    def __init__(
        self, grace_s: float, on_last_resort: Callable[[StopNow], None] | None = None
    ) -> None:
        self.received: signal.Signals | None = None
        self._grace_s = grace_s
        self._asked_grace_s: float | None = None
        self._on_last_resort = on_last_resort
        self._is_deferring = False
        self._forecast: StopForecast | None = None
        self._is_second = False  # a second signal came
        self._is_interruptible = False
        self._is_importing = False
        self._received_at = 0.0
        self._limit_s = 0.0  # from then on
        # The last resort's view: the handler runs a moment later, or never.
        self._first: signal.Signals | None = None
        self._seen_at = 0.0
        self._passed_in: signal.Signals | None = None
        self._asker = ""  # the command, if it was not a signal
        self._pass_on: Callable[[signal.Signals], None] | None = None
        self._main_thread = 0
        self._stack = contextlib.ExitStack()
        self._disarmed = threading.Event()

    def __enter__(self) -> Self:
        self._main_thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            # Restored last: the thread of the last resort sends this signal until it is joined.
            former = signal.signal(signal.SIGALRM, self._on_alarm)
            stack.callback(signal.signal, signal.SIGALRM, former)
            keep_from_forks(signal.SIGALRM)
            self._watch_wakeups(stack)
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                stack.callback(self._restore, number, signal.signal(number, self._on_signal))
                keep_from_forks(number)
            stack.callback(self.disarm)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _restore(self, number: signal.Signals, former: Any) -> None:
        signal.signal(number, signal.SIG_IGN if self.requested else former)

    def disarm(self) -> None:
        """Cancels all deadlines: nothing is left to be cut short."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._disarmed.set()

    def _watch_wakeups(self, stack: contextlib.ExitStack) -> None:
        """Starts the last resort: the interpreter writes signal numbers to a socket at once."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(
            target=self._last_resort, args=(reader,), name="umbra-signals", daemon=True
        )
        thread.start()
        stack.callback(reader.close)
        stack.callback(thread.join)
        stack.callback(writer.close)
        # Forks may have it, too, so closing it would not end the thread.
        stack.callback(writer.shutdown, socket.SHUT_WR)
        former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, former)

    def _last_resort(self, reader: socket.socket) -> None:
        """Makes the main thread run its handler; ends the process if that does not end it. Runs on
        its own thread until the writing end is closed.

        A signal may come just before the main thread begins to wait for a lock. Python then runs
        the handler after the wait, unless another signal interrupts it.
        """
        end_at = math.inf
        while True:
            first, left_s = self._first, end_at - time.monotonic()
            if first is not None and not self.requested:
                left_s = min(left_s, _WAKE_S)
            reader.settimeout(min(max(left_s, 0.001), threading.TIMEOUT_MAX))
            try:
                data = reader.recv(1)
            except TimeoutError:
                if first is not None and not self.requested:
                    signal.pthread_kill(self._main_thread, signal.SIGALRM)
            else:
                if not data:
                    return
                is_signal, now = data[0] in _SIGNALS, time.monotonic()
                if first is not None:
                    if is_signal and self._is_another(data[0], now - self._seen_at):
                        self._is_second = True
                        end_at = min(end_at, now + _LAST_RESORT_S)
                elif is_signal or self._passed_in is not None:
                    first = signal.Signals(data[0]) if is_signal else self._passed_in
                    assert first is not None
                    self._limit_s = self._grace_of(first)  # the handler may never run
                    self._seen_at, self._first = now, first
                    self._announce(first)
                if first is not None:  # a request may have shortened the time
                    end_at = min(end_at, self._seen_at + self._limit_s + _LAST_RESORT_S)
            if first is not None and self._disarmed.is_set():
                return
            if first is not None and time.monotonic() >= end_at:
                self._end(first)

    def _end(self, number: signal.Signals) -> NoReturn:
        if self._on_last_resort is not None:
            self._on_last_resort(self._stop_of(number))
        os._exit(stop_status(number))

    def _grace_of(self, number: signal.Signals) -> float:
        if not self._is_deferring:
            return 0.0
        if self._asked_grace_s is not None:
            return self._asked_grace_s
        return self._grace_s if self._forecast is None else self._forecast.grace_s(number)

    def _announce(self, number: signal.Signals) -> None:
        if self._is_deferring and self._forecast is not None:
            # The output may be stuck, and the last resort must not be.
            args = (self._asker or number.name,)
            threading.Thread(target=self._forecast.announce, args=args, daemon=True).start()

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.received is not None

    @property
    def exit_status(self) -> int:
        """0 without a signal."""
        return 0 if self.received is None else stop_status(self.received)

    @property
    def name(self) -> str:
        """The signal's name, or ""."""
        return self.received.name if self.received is not None else ""

    def defer(
        self,
        pass_on: Callable[[signal.Signals], None] | None = None,
        forecast: StopForecast | None = None,
    ) -> None:
        """Makes a first signal wait for the step boundary from now on. `pass_on` passes it to the
        other ranks; called in the handler, it must return at once and raise nothing."""
        self._pass_on = pass_on
        self._forecast = forecast
        self._is_deferring = True

    def pass_in(self, number: int, grace_s: float | None = None) -> None:
        """Takes a signal that another process got. Called on any thread, while this is entered.

        It never counts as a second request. SIGALRM makes the main thread handle it. `umbra
        stop` and `umbra preempt` give the step in progress `grace_s`; after a signal it can
        only shorten the time.
        """
        if grace_s is not None:
            self._limit(grace_s, "umbra preempt" if number == PREEMPT_SIGNAL else "umbra stop")
        self._passed_in = signal.Signals(number)
        signal.pthread_kill(self._main_thread, signal.SIGALRM)

    def _limit(self, grace_s: float, asker: str) -> None:
        first, limit_s = self._first, time.monotonic() - self._seen_at + grace_s
        if first is None or limit_s < self._limit_s:
            self._asked_grace_s, self._asker = grace_s, asker
            if first is not None:
                self._limit_s = limit_s
                self._announce(first)

    @contextmanager
    def interruptible(self, *consequences: type[Exception]) -> Generator[None]:
        """A block with a wait that a signal may end, with StopRequested. A signal to another rank
        ends this rank's wait with one of the errors `consequences`. The signal may arrive after
        them, so they are raised only if none follows shortly."""
        try:
            with self._interruptible():
                yield
        except consequences:
            with self._interruptible():
                time.sleep(_NEWS_LIMIT_S)
            raise

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        self._is_interruptible = True  # set before the check: a signal may come in between
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._is_interruptible = False

    @contextmanager
    def uninterruptible(self) -> Generator[None]:
        """Protects work that must not be left half done inside an `interruptible()` block:
        StopRequested is delayed until it is done."""
        former, self._is_interruptible = self._is_interruptible, False
        try:
            yield
        finally:
            self._is_interruptible = former

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self._begin(signal.Signals(number))
        elif self._is_another(number, time.monotonic() - self._received_at):
            self._is_second = True
            self._stop_now(self._stop_of(self.received))

    def _is_another(self, number: int, after_s: float) -> bool:
        """Whether a signal that long after the first is a second request. SIGTERM is none after
        `umbra stop`: torchrun also sends it when the ranks of another node have left first."""
        is_torchrun = number == signal.SIGTERM and self._asked_grace_s is not None
        return after_s >= _SAME_REQUEST_S and not is_torchrun

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            if self._passed_in is not None:
                self._begin(self._passed_in)
        elif time.monotonic() - self._received_at >= self._limit_s:
            self._stop_now(self._stop_of(self.received))
        elif self._is_interruptible:
            raise StopRequested

    def _begin(self, received: signal.Signals) -> None:
        self.received = received
        self._received_at = time.monotonic()
        self._limit_s = self._grace_of(received)
        if not self._is_deferring:
            self._stop_now(self._stop_of(received))
        if self._pass_on is not None and self._passed_in is None:
            self._pass_on(received)
        signal.setitimer(signal.ITIMER_REAL, min(_REPEAT_S, self._limit_s), _REPEAT_S)
        if self._is_interruptible:
            raise StopRequested

    @contextmanager
    def importing(self) -> Generator[None]:
        """A block that imports torch, whose modules in C++ abort the process if an exception comes
        from a signal's handler. The signal is acted on afterwards, or by the last resort."""
        self._is_importing = True
        try:
            yield
        finally:
            self._is_importing = False
        if self.received is not None:
            self._stop_now(self._stop_of(self.received))

    def _stop_now(self, stop: StopNow) -> None:
        if self._is_importing:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)  # cleaning up must not be interrupted
        raise stop

    def _stop_of(self, number: signal.Signals) -> StopNow:
        """The end of a process that has no time left to save anything."""
        cause = self._asker or number.name
        if not self._is_deferring:
            return StopNow(number, f"stopped by {cause} {NOTHING_TO_SAVE}")
        if self._is_second:
            why = "a second signal came before the step in progress had ended"
        else:
            limit_s = self._limit_s if self._asked_grace_s is None else self._asked_grace_s
            why = f"the step in progress did not end within {limit_s:g} s of {cause}"
        loss = "" if self._forecast is None else self._forecast.loss()
        return StopNow(number, f"{why}; {loss}" if loss else why)
