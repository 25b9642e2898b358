"""Explains why a verifier that sets an alarm fails outside of the main thread."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

# The message of Python's own error in signal.signal. Verifiers such as math-verify compare it.
_PYTHONS_TEXT: Final = "signal only works in main thread of the main interpreter"
_NOTE: Final = (
    "umbra runs reward functions without `async` on the main thread, where alarms work. Agent "
    "loops and `async def` rewards have it only if there is no such function. Do this in a reward "
    "function without async, and not in asyncio.to_thread; or turn the alarm off, in math-verify "
    "by parsing_timeout=None and timeout_seconds=None."
)


def explain_signals() -> None:
    """Adds a note to errors of `signal.signal`, `alarm` and `setitimer`, and logs it once."""
    for name in ("signal", "alarm", "setitimer"):
        setattr(signal, name, _explaining(name, getattr(signal, name)))


def _explaining(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return function(*args, **kwargs)
        _log_once(name)
        error = ValueError(_PYTHONS_TEXT)
        error.add_note(_NOTE)
        raise error

    return call


@functools.cache
def _log_once(name: str) -> None:
    logger.warning("signal.%s: %s. %s", name, _PYTHONS_TEXT, _NOTE, stack_info=True)
