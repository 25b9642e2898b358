"""However many messages are dropped, few lines are logged, and every one is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest

from umbra.runtime.errors import ProtocolError
from umbra.runtime.rpc.loop_socket import REPORT_INTERVAL_S, DroppedMessages


class Timers:
    """A loop's timers, by hand."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.waiting: list[asyncio.TimerHandle] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        assert delay_s == REPORT_INTERVAL_S
        handle = asyncio.TimerHandle(0.0, callback, (), self._loop)
        self.waiting.append(handle)
        return handle

    def pass_interval(self) -> None:
        (handle,) = self.waiting
        self.waiting.clear()
        handle._run()

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def timers() -> Iterator[Timers]:
    found = Timers()
    yield found
    found.close()


def test_the_first_is_logged_at_once_and_then_a_number_once_per_interval(
    timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = DroppedMessages("a caller", timers.call_later)

    for idx in range(1000):
        dropped.add(ProtocolError(f"garbage {idx}"))
    at_once = caplog.messages[:]
    timers.pass_interval()
    timers.pass_interval()
    dropped.add(ProtocolError("again"))

    assert at_once == ["dropped a message from a caller: ProtocolError: garbage 0"]
    assert caplog.messages[1:] == [
        "dropped 999 more messages from a caller, 1000 in all; the last: "
        "ProtocolError: garbage 999",
        "dropped a message from a caller: ProtocolError: again",
    ]


def test_what_has_not_been_reported_is_when_the_socket_closes(
    timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = DroppedMessages("a caller", timers.call_later)
    for _ in range(3):
        dropped.add(ProtocolError("garbage"))
    caplog.clear()

    dropped.close()

    assert [message.partition(";")[0] for message in caplog.messages] == [
        "dropped 2 more messages from a caller, 3 in all"
    ]
    assert timers.waiting[0].cancelled()


def test_only_a_bug_of_the_handler_has_a_stack_trace(
    timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        DroppedMessages("a caller", timers.call_later).add(ProtocolError("garbage"))
        timers.waiting.clear()
        DroppedMessages("a caller", timers.call_later).add(KeyError("bug"))

    assert [record.exc_info is not None for record in caplog.records] == [False, True]
