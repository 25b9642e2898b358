"""Shows lines to the operator, from any thread, before and after there is a progress display."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from umbra.runtime.escaping import escape_unprintable


class NoteBoard:
    """Shows notes on stderr, or with the function of `shown_by`; nothing if not `is_shown`."""

    def __init__(self, *, is_shown: bool) -> None:
        self._show: Callable[[str], None] = _print if is_shown else _ignore
        self._lock = threading.Lock()

    def put(self, text: str) -> None:
        """Shows one line."""
        with self._lock:
            self._show(escape_unprintable(text))

    @contextmanager
    def shown_by(self, show: Callable[[str], None]) -> Generator[None]:
        """Shows notes with `show` inside the block."""
        with self._lock:
            former, self._show = self._show, show
        try:
            yield
        finally:
            with self._lock:
                self._show = former


def _print(text: str) -> None:
    # One write: ranks share stderr, and print() may write the line's end apart.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _ignore(text: str) -> None:
    del text
