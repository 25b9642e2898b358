from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from umbra.runtime.errors import ProtocolError

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 10.0
"""Shortest time between two lines about one socket. Shorter lets a peer that sends only garbage
fill the disk; longer delays the report that it still does."""


class DroppedMessages:
    """Logs dropped messages in few lines, however many there are. The first one is logged at once;
    then, once per interval, the number of new ones and the last."""

    def __init__(
        self, sender: str, call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle]
    ) -> None:
        self._sender = sender
        self._call_later = call_later
        self._timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._num_unreported = 0
        self._last = ""

    def add(self, error: Exception) -> None:
        """Reports one dropped message. Any error but ProtocolError is a bug of the handler. Only
        the error's text is kept: its traceback would keep the message."""
        self._num_dropped += 1
        text = f"{type(error).__name__}: {error}"
        if self._timer is not None:
            self._num_unreported += 1
            self._last = text
            return
        is_bug = not isinstance(error, ProtocolError)
        logger.warning(
            "dropped a message from %s: %s", self._sender, text, exc_info=error if is_bug else None
        )
        self._timer = self._call_later(REPORT_INTERVAL_S, self._on_interval)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._report()

    def _on_interval(self) -> None:
        self._timer = None
        if self._report():
            self._timer = self._call_later(REPORT_INTERVAL_S, self._on_interval)

    def _report(self) -> bool:
        num, self._num_unreported = self._num_unreported, 0
        if num:
            logger.warning(
                "dropped %d more messages from %s, %d in all; the last: %s",
                num, self._sender, self._num_dropped, self._last,
            )  # fmt: skip
        return num > 0
