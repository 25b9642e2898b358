from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from umbra.runtime.process.exit_status import STOP_SIGNALS


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
