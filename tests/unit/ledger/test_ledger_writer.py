"""Appending from a loop: tickets, group commit, back-pressure, and errors that reach everybody."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from async_tests import on_a_loop, skip_time
from ledger_replay import replay
from ledger_samples import life_of_a_group, versions_in

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Recorded, Version
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter, Ticket


class HeldDisk:
    """Syncs wait until they are released, one by one or all."""

    def __init__(self, real_sync: Callable[[int], None]) -> None:
        self._real_sync = real_sync
        self._begun = threading.Semaphore(0)
        self._released = threading.Semaphore(0)

    def sync(self, descriptor: int) -> None:
        self._begun.release()
        assert self._released.acquire(timeout=30)
        self._real_sync(descriptor)

    async def next_sync(self) -> None:
        """Returns once one more sync has begun."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=30)

    def release(self, num_syncs: int = 1000) -> None:
        self._released.release(num_syncs)


@contextmanager
def held_disk(monkeypatch: pytest.MonkeyPatch) -> Generator[HeldDisk]:
    disk = HeldDisk(os.fsync)
    monkeypatch.setattr(os, "fsync", disk.sync)
    try:
        yield disk
    finally:
        disk.release()
        monkeypatch.undo()


@on_a_loop
async def test_durable_means_on_disk_and_hurries_the_thread(tmp_path: Path) -> None:
    async with LedgerWriter(LedgerLog.open(tmp_path, "job"), flush_s=60.0) as writer:
        await writer.durable(writer.append(Version(0, 0)), 10.0)  # the first is never held
        ticket = writer.append(*life_of_a_group(0, "a", 0, 0))
        await writer.durable(ticket, 10.0)

        assert replay(read_history(tmp_path).entries).next_uid == 2
        assert writer.queued_nbytes == 0
        assert read_history(tmp_path).end == writer.position
        await writer.durable(ticket, 10.0)


def test_what_is_appended_meanwhile_shares_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        log = LedgerLog.open(tmp_path, "job")
        async with LedgerWriter(log, flush_s=60.0) as writer:
            with held_disk(monkeypatch) as disk:
                first = writer.append(Version(0, 0))
                waiting = asyncio.gather(writer.durable(first, 10.0))
                await disk.next_sync()
                later = [writer.append(Version(version, 0)) for version in range(1, 100)]
                disk.release()
                await waiting
                await writer.durable(later[-1], 10.0)

    asyncio.run(body())
    entries = list(read_history(tmp_path).entries())
    assert versions_in(tmp_path) == list(range(100))
    assert len({entry.position for entry in entries}) == 2


def test_nothing_appended_is_lost_at_close(tmp_path: Path) -> None:
    async def body() -> None:
        async with LedgerWriter(LedgerLog.open(tmp_path, "job"), flush_s=60.0) as writer:
            for version in range(500):
                writer.append(Version(version, 0))
        with pytest.raises(LedgerError, match="closed"):
            writer.append(Version(500, 0))

    asyncio.run(body())
    assert versions_in(tmp_path) == list(range(500))


@on_a_loop
async def test_appends_are_flushed_without_anybody_waiting(tmp_path: Path) -> None:
    async with LedgerWriter(LedgerLog.open(tmp_path, "job"), flush_s=0.02) as writer:
        for version in range(5):
            writer.append(Version(version, 0))
            async with asyncio.timeout(10.0):
                while writer.queued_nbytes:  # noqa: ASYNC110 - nobody may wait
                    await asyncio.sleep(0.005)
        assert versions_in(tmp_path) == list(range(5))


@on_a_loop
async def test_there_is_capacity_again_once_the_disk_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, progressed = LedgerLog.open(tmp_path, "job"), asyncio.Event()
    async with LedgerWriter(log, max_queued_nbytes=1000, on_progress=progressed.set) as writer:
        with held_disk(monkeypatch) as disk:
            assert writer.has_capacity
            writer.append(Recorded(0, "page", b"x" * 2000))
            writer.append(Version(0, 0))  # taken all the same
            assert not writer.has_capacity
            await disk.next_sync()
            assert not progressed.is_set()
            disk.release()
            async with asyncio.timeout(10.0):
                await progressed.wait()
            assert writer.has_capacity


@on_a_loop
async def test_a_full_queue_on_a_stalled_disk_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, progressed = LedgerLog.open(tmp_path, "job"), asyncio.Event()
    writer = LedgerWriter(
        log, max_queued_nbytes=1000, stall_timeout_s=0.1, on_progress=progressed.set
    )
    with pytest.raises(LedgerError, match=r"none was for 0\.1 s"):  # noqa: PT012 - at the end too
        async with writer:
            with held_disk(monkeypatch):
                ticket = writer.append(Recorded(0, "page", b"x" * 2000))
                waiting = asyncio.gather(writer.durable(ticket, 60.0), return_exceptions=True)
                async with asyncio.timeout(10.0):
                    await progressed.wait()
                assert [type(error) for error in await waiting] == [LedgerError]
                writer.append(Version(0, 0))


@on_a_loop
async def test_a_disk_that_is_only_slow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, progressed = LedgerLog.open(tmp_path, "job"), asyncio.Event()
    with held_disk(monkeypatch) as disk:
        async with LedgerWriter(
            log, max_queued_nbytes=1, stall_timeout_s=1000.0, on_progress=progressed.set
        ) as writer:
            page = b"x" * 3_000_000  # a frame takes one
            tickets = [writer.append(Recorded(0, f"page{idx}", page)) for idx in range(6)]
            waiting = asyncio.gather(writer.durable(tickets[-1], 1000.0))
            for _ in tickets:
                await disk.next_sync()
                skip_time(600.0)
                assert not writer.has_capacity
                progressed.clear()
                disk.release(1)
                await progressed.wait()
            await waiting
            assert writer.has_capacity

    assert len({entry.position for entry in read_history(tmp_path).entries()}) == 6


@on_a_loop
async def test_a_disk_that_does_not_answer_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LedgerLog.open(tmp_path, "job")
    async with LedgerWriter(log) as writer:
        with held_disk(monkeypatch):
            ticket = writer.append(Version(0, 0))
            with pytest.raises(LedgerError, match=r"none was for 0\.05 s"):
                await writer.durable(ticket, 0.05)
        await writer.durable(ticket, 10.0)


def test_a_full_disk_reaches_every_waiter_and_every_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    async def body() -> None:
        writer = LedgerWriter(LedgerLog.open(tmp_path, "job"))
        with pytest.raises(LedgerError, match="the disk is full"):  # noqa: PT012 - at the end too
            async with writer:
                kept = writer.append(Version(0, 0))
                await writer.durable(kept, 10.0)
                monkeypatch.setattr(os, "writev", full)
                ticket = writer.append(Recorded(0, "page", b"x" * 400))
                found = await asyncio.gather(
                    writer.durable(ticket, 10.0),
                    writer.durable(ticket, 10.0),
                    return_exceptions=True,
                )
                assert [type(error) for error in found] == [LedgerError] * 2
                assert "000001-0000.log: the disk is full (" in str(found[0])
                await writer.durable(kept, 10.0)
                with pytest.raises(LedgerError, match="the disk is full"):
                    await writer.durable(ticket, 10.0)
                writer.append(Version(1, 0))

    asyncio.run(body())
    monkeypatch.undo()
    assert versions_in(tmp_path) == [0]


@on_a_loop
async def test_an_unknown_ticket_is_the_callers_mistake(tmp_path: Path) -> None:
    async with LedgerWriter(LedgerLog.open(tmp_path, "job")) as writer:
        with pytest.raises(ValueError, match="ticket 1 is unknown: 0 were issued"):
            await writer.durable(Ticket(1), 1.0)


def test_the_thread_ends_with_the_writer(tmp_path: Path) -> None:
    async def body() -> None:
        async with LedgerWriter(LedgerLog.open(tmp_path, "job")):
            assert "ledger" in {thread.name for thread in threading.enumerate()}

    asyncio.run(body())
    assert "ledger" not in {thread.name for thread in threading.enumerate()}
