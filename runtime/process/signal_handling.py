"""Signal handling: reset in forks, and stop signals that wait."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any

from umbra.runtime.process.process_end import STOP_SIGNALS

_Handler = Callable[[int, FrameType | None], Any] | int | None

_handlers: dict[int, _Handler] = {}
_forking = threading.local()


def keep_from_forks(*numbers: int) -> None:
    """Forks take the default action on these signals while the present handlers are installed.

     process                                   fork of it, as of `multiprocessing`
       | os.fork() with all signals blocked       |
       |                                          | no wake-up descriptor, the default actions again
       | <-- signals unblocked -->                |

    A fork inherits handlers and the wake-up descriptor of `signal.set_wakeup_fd`. Without this, a
    SIGTERM to the fork would be written into its parent's descriptor, where it counts as the
    parent's, and the fork would ignore it. Signals are blocked meanwhile, because the first one may
    come at once.
    """
    for number in numbers:
        _handlers[number] = signal.getsignal(number)


def handle_signals(
    numbers: Iterable[signal.Signals], callback: Callable[[signal.Signals], object]
) -> None:
    """Calls `callback` with the number on the running event loop, but not in forks."""
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, callback, number)
        keep_from_forks(number)


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset() -> None:
    signal.set_wakeup_fd(-1)
    for number, handler in _handlers.items():
        if signal.getsignal(number) == handler:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)


@contextmanager
def delayed_stops() -> Generator[None]:
    """Stop signals that come inside the block reach their handlers at its end.

    A handler's exception then cannot leave a half-made resource behind: the caller has stored it.
    Handlers run on the main thread, so other threads see no effect. The signals are not blocked:
    the kernel would give them to another thread, and Python would run the handler on the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in handlers.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
