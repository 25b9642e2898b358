"""Runs of memory that hold tensors, and the way of a segment's chunks to another process.

Memfds stand in for chunks of a GPU's memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.exports import segment_memory
from umbra.runtime.weights.exports.segment_memory import (
    MemoryRun,
    deposit_chunks,
    find_runs,
    locate,
    map_chunks,
    unmap_chunks,
)
from umbra.runtime.weights.image.fd_server import FdServer, serve_fds
from umbra.runtime.weights.rank_exports import ChunksHandle

CHUNK = 100


class FakeMemory:
    """Chunks and allocations by first address: bytes, whether it is a chunk. Numbers are addresses
    plus 1."""

    def __init__(self, pieces: Mapping[int, tuple[int, bool]]) -> None:
        self._pieces = pieces

    def address_range(self, pointer: int) -> tuple[int, int]:
        for base, (nbytes, _) in self._pieces.items():
            if base <= pointer < base + nbytes:
                return base, nbytes
        raise WeightSyncError("no memory there")

    def buffer_id(self, pointer: int) -> int:
        return self.address_range(pointer)[0] + 1

    def is_chunk(self, pointer: int) -> bool:
        return self._pieces[self.address_range(pointer)[0]][1]


def chunks(*bases: int, nbytes: int = CHUNK) -> dict[int, tuple[int, bool]]:
    return {base: (nbytes, True) for base in bases}


def test_adjacent_chunks_that_hold_tensors_are_one_run() -> None:
    memory = FakeMemory(chunks(0, 100, 200, 300, 400, 500, 700))

    runs = find_runs(memory, [(550, 50), (110, 250), (590, 10), (720, 1)])

    assert runs == [
        MemoryRun(100, CHUNK, (101, 201, 301), True),
        MemoryRun(500, CHUNK, (501,), True),
        MemoryRun(700, CHUNK, (701,), True),
    ]
    assert [locate(runs, *span) for span in [(110, 250), (550, 50), (720, 1)]] == [
        (0, 10),
        (1, 50),
        (2, 20),
    ]
    assert list(runs[0].chunks()) == [(100, 101), (200, 201), (300, 301)]


def test_allocations_and_chunks_of_other_sizes_are_runs_of_their_own() -> None:
    pieces = {**chunks(0, 100), **chunks(200, nbytes=20), 220: (80, False), 300: (80, False)}
    spans = [(0, 200), (200, 20), (230, 70), (300, 4)]

    runs = find_runs(FakeMemory(pieces), spans)

    assert [(run.base, run.nbytes, run.is_chunked) for run in runs] == [
        (0, 200, True),
        (200, 20, True),
        (220, 80, False),
        (300, 80, False),
    ]
    assert [locate(runs, *span) for span in spans] == [(0, 0), (1, 0), (2, 10), (3, 0)]


def test_a_tensor_across_chunks_of_different_sizes_is_refused() -> None:
    runs = find_runs(FakeMemory({**chunks(0), **chunks(100, nbytes=20)}), [(90, 20)])

    with pytest.raises(WeightSyncError, match="different sizes"):
        locate(runs, 90, 20)


class FakeDriver:
    """Maps memfds, of which each has the address of its chunk as its size.

    Attributes:
        mapped: the address of each mapped chunk, and that which it had in the exporter.
        readable: what a GPU may read: address, bytes, GPU.
        num_mappable: chunks that can still be mapped.
    """

    def __init__(self, num_mappable: int = 1 << 20) -> None:
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.readable: list[tuple[int, int, int]] = []
        self.num_mappable = num_mappable

    def export_chunk(self, pointer: int) -> int:
        fd = os.memfd_create("chunk", os.MFD_CLOEXEC)
        os.ftruncate(fd, pointer)
        return fd

    def reserve(self, nbytes: int) -> int:
        self.reserved[1 << 30] = nbytes
        return 1 << 30

    def free_addresses(self, first: int, nbytes: int) -> None:
        assert not self.mapped
        assert self.reserved.pop(first) == nbytes

    def map_chunk(self, address: int, nbytes: int, fd: int) -> None:
        if len(self.mapped) == self.num_mappable:
            raise WeightSyncError("cuMemMap failed")
        assert nbytes == CHUNK
        self.mapped[address] = os.fstat(fd).st_size

    def allow_reading(self, address: int, nbytes: int, device: int) -> None:
        assert len(self.mapped) * CHUNK == nbytes
        self.readable.append((address, nbytes, device))

    def unmap(self, address: int, nbytes: int) -> None:
        for offset in range(0, nbytes, CHUNK):
            del self.mapped[address + offset]


def run_of(num_chunks: int) -> MemoryRun:
    return MemoryRun(4096, CHUNK, tuple(range(num_chunks)), True)


def with_server(folder: Path, work: Callable[[FdServer, str], None]) -> None:
    path = str(folder / "fds")

    async def body() -> None:
        async with serve_fds(path) as server, asyncio.timeout(20.0):
            await asyncio.to_thread(work, server, path)

    asyncio.run(body())


@pytest.mark.parametrize("num_chunks", [1, 64, 253, 600])
def test_chunks_are_mapped_side_by_side_in_order(tmp_path: Path, num_chunks: int) -> None:
    def work(server: FdServer, path: str) -> None:
        run, driver = run_of(num_chunks), FakeDriver()
        handle, deposit = deposit_chunks(driver, run, path)
        assert handle == ChunksHandle(path, handle.name, num_chunks)
        assert server.num_deposited == num_chunks

        base = map_chunks(driver, handle, run.nbytes, 3)

        assert list(driver.mapped.values()) == [address for address, _ in run.chunks()]
        assert sorted(driver.mapped) == [base + idx * CHUNK for idx in range(num_chunks)]
        assert driver.readable == [(base, run.nbytes, 3)]
        unmap_chunks(driver, base, run.nbytes)
        assert driver.reserved == {}
        deposit.close()
        assert server.num_deposited == 0

    with_server(tmp_path, work)


def test_deposits_of_the_same_memory_have_different_names(tmp_path: Path) -> None:
    """A deposit may end while the server still has the last one of the same memory."""

    def work(server: FdServer, path: str) -> None:
        made = [deposit_chunks(FakeDriver(), run_of(2), path) for _ in range(2)]
        assert made[0][0] != made[1][0]
        for _, deposit in made:
            deposit.close()

    with_server(tmp_path, work)


@pytest.mark.parametrize("num_mappable", [0, 5, 300])
def test_memory_that_cannot_be_mapped_to_the_end_is_unmapped(
    tmp_path: Path, num_mappable: int
) -> None:
    def work(server: FdServer, path: str) -> None:
        run, driver = run_of(400), FakeDriver(num_mappable)
        num_before = len(os.listdir("/proc/self/fd"))
        handle, deposit = deposit_chunks(driver, run, path)

        with pytest.raises(WeightSyncError, match="cuMemMap failed"):
            map_chunks(driver, handle, run.nbytes, 0)

        assert (driver.mapped, driver.reserved) == ({}, {})
        deposit.close()
        assert len(os.listdir("/proc/self/fd")) == num_before

    with_server(tmp_path, work)


def test_a_deposit_that_has_ended_cannot_be_opened(tmp_path: Path) -> None:
    def work(server: FdServer, path: str) -> None:
        run, driver = run_of(3), FakeDriver()
        handle, deposit = deposit_chunks(driver, run, path)
        deposit.close()

        with pytest.raises(WeightSyncError, match="no deposited descriptors of that name"):
            map_chunks(driver, handle, run.nbytes, 0)
        assert driver.reserved == {}

    with_server(tmp_path, work)


def test_a_server_that_is_gone_is_an_error_of_the_sync(tmp_path: Path) -> None:
    driver, handle = FakeDriver(), ChunksHandle(str(tmp_path / "none"), "ab", 2)

    with pytest.raises(WeightSyncError, match="cannot receive the rank's memory"):
        map_chunks(driver, handle, 2 * CHUNK, 0)

    assert driver.reserved == {}


def test_a_deposit_that_is_refused_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(server: FdServer, path: str) -> None:
        def export(pointer: int) -> int:
            if pointer >= 4096 + 100 * CHUNK:
                raise WeightSyncError("cuMemExportToShareableHandle failed")
            return FakeDriver.export_chunk(driver, pointer)

        driver = FakeDriver()
        monkeypatch.setattr(driver, "export_chunk", export)
        num_before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(WeightSyncError, match="cuMemExportToShareableHandle failed"):
            deposit_chunks(driver, run_of(400), path)
        assert server.num_deposited == 0
        assert len(os.listdir("/proc/self/fd")) == num_before

    monkeypatch.setattr(segment_memory, "_NUM_DEPOSITED_AT_ONCE", 7)
    with_server(tmp_path, work)
