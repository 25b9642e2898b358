"""The event loop on a background thread: every call ends, whatever happens to the job."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from umbra.runtime.errors import JobFailed, MailboxClosed
from umbra.runtime.rpc.sync_handle import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("test-loop") as thread:
        yield thread


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail() -> None:
    raise ValueError("no")


def test_a_call_gives_its_value_or_raises(loop: LoopThread) -> None:
    assert loop.run(answer()) == 42
    with pytest.raises(ValueError, match="no"):
        loop.run(fail())


def test_a_failure_ends_what_is_blocked_and_what_comes_later(loop: LoopThread) -> None:
    async def lose() -> None:
        await asyncio.sleep(0.05)
        loop.fail(JobFailed("rank 1 failed"))
        loop.fail(JobFailed("a consequence"))

    loop.start(lose())

    with pytest.raises(JobFailed, match="rank 1 failed"):
        loop.run(asyncio.sleep(60))
    with pytest.raises(JobFailed, match="rank 1 failed"):
        loop.run(answer())
    assert loop.run(answer(), even_if_failed=True) == 42


def test_a_failure_in_the_moment_a_call_begins_ends_the_call(loop: LoopThread) -> None:
    """Both arrive while the loop is busy, so the call's task is cancelled before its first step."""
    is_held = threading.Event()

    async def hold_then_lose() -> None:
        is_held.set()
        time.sleep(0.2)  # noqa: ASYNC251 -- holding the loop is the point
        await asyncio.sleep(0)
        loop.fail(JobFailed("rank 1 failed"))

    loop.start(hold_then_lose())
    is_held.wait(10.0)

    with pytest.raises(JobFailed, match="rank 1 failed"):
        loop.run(asyncio.sleep(60))


def test_leaving_ends_what_still_runs_and_refuses_what_waits() -> None:
    with LoopThread("test-loop") as loop:
        loop.start(asyncio.sleep(60))

    with pytest.raises(MailboxClosed):
        loop.run(answer())
