"""The control block of a sync: waits and wakes between processes, and every way a wait ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.runtime.errors import DeadlineExceeded, JobFailed, WeightSyncError
from umbra.runtime.weights.image import sync_progress
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.image.sync_progress import EngineEnd, SyncProgress

NUM_RANKS, NUM_ENGINES = 2, 2
FAR_S = 20.0

# Acts as rank 1: fills a bucket when rank 0 has filled it, 200 in all.
FILLING_RANK = """
import sys, time
from umbra.runtime.weights.image.sync_progress import SyncProgress
progress = SyncProgress(int(sys.argv[1]), 2, 1)
for idx in range(200):
    while progress.num_filled()[0] <= idx:
        time.sleep(0)
    progress.set_filled(1, idx + 1)
"""


@dataclass
class Block:
    fd: int
    progress: SyncProgress

    def peer(self) -> SyncProgress:
        """Another mapping, as another process has it."""
        return SyncProgress(self.fd, NUM_RANKS, NUM_ENGINES)


@pytest.fixture
def block() -> Iterator[Block]:
    fd, progress = SyncProgress.create("block", NUM_RANKS, NUM_ENGINES)
    yield Block(fd, progress)
    progress.close()
    os.close(fd)


def later(seconds: float, call: object, *args: object) -> threading.Timer:
    timer = threading.Timer(seconds, call, args)  # pyright: ignore[reportArgumentType]
    timer.start()
    return timer


def test_two_processes_follow_each_other() -> None:
    fd, progress = SyncProgress.create("two", 2, 1)
    command = [sys.executable, "-c", FILLING_RANK, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd]) as rank:
        for idx in range(200):
            progress.set_filled(0, idx + 1)
            assert progress.wait_filled(idx + 1, time.monotonic() + FAR_S)
            assert progress.num_filled() == [idx + 1, idx + 1]
        assert rank.wait(FAR_S) == 0
    progress.close()
    os.close(fd)


def test_a_wait_is_for_every_rank(block: Block) -> None:
    rank = block.peer()
    rank.set_filled(0, 5)

    def fill_the_other() -> None:
        rank.set_filled(1, 1)

    assert block.progress.wait_filled(1, time.monotonic() + FAR_S, fill_the_other)

    assert block.progress.num_filled() == [5, 1], "it had not ended before the other one filled"


def test_an_abort_ends_waits(block: Block) -> None:
    supervisor = block.peer()

    assert not block.progress.wait_filled(1, time.monotonic() + FAR_S, supervisor.abort)
    assert not block.progress.wait_filled(0, time.monotonic() + FAR_S)


def test_a_deadline_ends_a_wait(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at_clock: list[float] = []

    def tick() -> float:
        looks_at_clock.append(len(looks_at_clock) / 100)
        return looks_at_clock[-1]

    monkeypatch.setattr(sync_progress, "time", SimpleNamespace(monotonic=tick))
    with pytest.raises(DeadlineExceeded, match="0 of at least 1"):
        block.progress.wait_filled(1, 0.2)

    assert looks_at_clock[-1] == 0.2


def test_a_wait_looks_around_now_and_then(block: Block) -> None:
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            raise JobFailed("rank 7 failed")

    with pytest.raises(JobFailed):
        block.progress.wait_filled(1, time.monotonic() + FAR_S, look)


def test_a_closed_block_reaches_nobody(block: Block) -> None:
    late = block.peer()
    late.close()
    late.set_filled(0, 1)
    late.abort()
    late.close()

    assert late.is_aborted
    assert not block.progress.is_aborted
    assert block.progress.num_filled() == [0, 0]


def test_a_descriptor_that_is_too_small_is_refused() -> None:
    fd, progress = SyncProgress.create("small", 1, 1)
    with pytest.raises(WeightSyncError, match="expected"):
        SyncProgress(fd, 500, 500)
    progress.close()
    os.close(fd)


class TestEngineEnd:
    @staticmethod
    @contextmanager
    def made(block: Block, folder: Path, timeout_s: float = FAR_S) -> Generator[EngineEnd]:
        """Engine 1 of the block, received as an engine does."""
        sizes = {"num_ranks": NUM_RANKS, "num_engines": NUM_ENGINES}
        own = {"name": "block", "engine": 1, "timeout_s": timeout_s}
        socket_path = str(folder / "fds")

        async def receive() -> EngineEnd:
            async with serve_fds(socket_path, {"block": block.fd}):
                wire = {"fd_socket": socket_path, "progress": sizes | own}
                return await asyncio.to_thread(EngineEnd, wire, 5.0)

        with closing(asyncio.run(receive())) as end:
            yield end

    def test_a_bucket_counts_when_the_engine_says_so(self, block: Block, tmp_path: Path) -> None:
        for rank in range(NUM_RANKS):
            block.progress.set_filled(rank, 2)
        with self.made(block, tmp_path) as end:
            buckets = end.buckets(2)

            assert next(buckets) == 0
            assert next(buckets) == 1
            assert block.progress.num_loaded(1) == 0
            end.set_loaded(1)
            assert block.progress.num_loaded(1) == 1
            assert list(buckets) == []
            end.set_loaded(2)
            assert block.progress.num_loaded(1) == 2
            with pytest.raises(WeightSyncError, match="before"):
                next(end.buckets(2))

    def test_an_engine_that_waits_for_ranks_has_nothing_to_do(
        self, block: Block, tmp_path: Path
    ) -> None:
        """It cannot begin with a tensor of which some buckets are there."""
        progress = block.progress
        progress.set_filled(0, 3)
        progress.set_filled(1, 2)
        with self.made(block, tmp_path) as end, ThreadPoolExecutor(1) as threads:
            assert progress.has_work(1)
            waiting = threads.submit(end.wait_filled, 4)
            while progress.has_work(1):
                assert not waiting.done()
            progress.set_filled(1, 3)
            while progress.has_work(1):
                assert not waiting.done()

            progress.set_filled(0, 4)
            progress.set_filled(1, 4)
            waiting.result(FAR_S)

            assert progress.has_work(1)
            end.set_loaded(4)
            assert not progress.has_work(1)

    def test_what_ends_it(self, block: Block, tmp_path: Path) -> None:
        with (
            self.made(block, tmp_path, timeout_s=0.1) as hasty,
            pytest.raises(WeightSyncError, match="bucket 0 was not filled within the time"),
        ):
            next(hasty.buckets(3))

        with self.made(block, tmp_path) as closed, self.made(block, tmp_path) as other:
            later(0.1, closed.close)
            with pytest.raises(WeightSyncError, match="being stopped"):
                next(closed.buckets(3))
            later(0.1, block.progress.abort)
            with pytest.raises(WeightSyncError, match="aborted"):
                next(other.buckets(3))

    def test_an_engine_stops_in_all_its_processes(self, block: Block, tmp_path: Path) -> None:
        with self.made(block, tmp_path) as engine, self.made(block, tmp_path) as worker:
            later(0.1, engine.stop)
            with pytest.raises(WeightSyncError, match="being stopped"):
                next(worker.buckets(3))

        assert not block.progress.is_stopped(0)
