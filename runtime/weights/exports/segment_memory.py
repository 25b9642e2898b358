"""Memory of torch's expandable segments, in the rank and in a process that opens it.

The driver has no handle for such memory, but a descriptor for each of its physical chunks. The rank
deposits them with the descriptor server of its node, and others receive them there:

    rank                        server                        engine
      | -- fds of all chunks -----> | <- request, a portion each -- |
      |    (closed in the rank)     | -- fds ---------------------> |   maps them side by side,
      | -- end of the connection -> |   closes them                 |   closes them

A descriptor keeps the memory, as a mapping does. Freed memory of the rank returns to the GPU when
the deposit has ended and all mappings are gone.
"""

from __future__ import annotations

import bisect
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, WeightSyncError
from umbra.runtime.weights.image.fd_server import MAX_FDS, FdDeposit, received_deposit
from umbra.runtime.weights.rank_exports import ChunksHandle

_DEPOSIT_TIMEOUT_S: Final = 5.0
_RECEIVE_TIMEOUT_S: Final = 10.0
# Time for all portions of one run. A portion of 253 takes 24 ms to receive and map on an H100.
_NUM_DEPOSITED_AT_ONCE: Final = 64
# Descriptors that a rank has open at a time. With more, the ranks of a node together exceed the
# common limit of descriptors in flight, 1,024 for a user; with fewer, there are more round trips.


class ChunkDriver(Protocol):
    def export_chunk(self, pointer: int) -> int: ...
    def reserve(self, nbytes: int) -> int: ...
    def free_addresses(self, first: int, nbytes: int) -> None: ...
    def map_chunk(self, address: int, nbytes: int, fd: int) -> None: ...
    def allow_reading(self, address: int, nbytes: int, device: int) -> None: ...
    def unmap(self, address: int, nbytes: int) -> None: ...


def deposit_chunks(
    driver: ChunkDriver, run: MemoryRun, fd_socket: str
) -> tuple[ChunksHandle, FdDeposit]:
    """Deposits all chunks of a run under a new name. The caller owns the deposit."""
    handle = ChunksHandle(fd_socket, secrets.token_hex(16), len(run.buffer_ids))
    deposit = FdDeposit(fd_socket, handle.name, _DEPOSIT_TIMEOUT_S)
    try:
        addresses = [address for address, _ in run.chunks()]
        for first in range(0, len(addresses), _NUM_DEPOSITED_AT_ONCE):
            fds: list[int] = []
            try:
                for address in addresses[first : first + _NUM_DEPOSITED_AT_ONCE]:
                    fds.append(driver.export_chunk(address))
                deposit.add(fds)
            finally:
                for fd in fds:
                    os.close(fd)
    except BaseException:
        deposit.close()
        raise
    return handle, deposit


def map_chunks(driver: ChunkDriver, handle: ChunksHandle, nbytes: int, device: int) -> int:
    """Maps all chunks side by side for GPU `device` to read; returns the first address. Raises
    WeightSyncError if they cannot be received in time or mapped; nothing is left mapped then."""
    base, mapped_nbytes = driver.reserve(nbytes), 0
    try:
        chunk_nbytes = nbytes // handle.num_chunks
        deadline = time.monotonic() + _RECEIVE_TIMEOUT_S
        for first in range(0, handle.num_chunks, MAX_FDS):
            num_fds = min(MAX_FDS, handle.num_chunks - first)
            left_s = max(0.001, deadline - time.monotonic())
            with received_deposit(handle.fd_socket, handle.name, first, num_fds, left_s) as fds:
                for fd in fds:
                    driver.map_chunk(base + mapped_nbytes, chunk_nbytes, fd)
                    mapped_nbytes += chunk_nbytes
        driver.allow_reading(base, nbytes, device)
    except BaseException as error:
        with suppress(WeightSyncError):  # the first error is the one to raise
            if mapped_nbytes:
                driver.unmap(base, mapped_nbytes)
            driver.free_addresses(base, nbytes)
        if isinstance(error, ConnectionLost | DeadlineExceeded):
            raise WeightSyncError(f"cannot receive the rank's memory: {error}") from error
        raise
    return base


def unmap_chunks(driver: ChunkDriver, base: int, nbytes: int) -> None:
    driver.unmap(base, nbytes)
    driver.free_addresses(base, nbytes)


class AddressDriver(Protocol):
    """Finds the memory that holds tensors, as runs that are exported as one. Torch-free.

        tensors          |--a--|   |-----b-----|           |-c-|
        chunks       | 0    | 1    | 2    | 3    | 4    | 5    |
        runs         |            0              |      |  1   |

    An allocation of cudaMalloc is a run by itself. torch's expandable segments consist of physical
    chunks that are adjacent in address space, and a tensor may begin and end anywhere in them: a
    run is as many adjacent chunks of the same size as hold tensors.
    """

    def address_range(self, pointer: int) -> tuple[int, int]: ...
    def buffer_id(self, pointer: int) -> int: ...
    def is_chunk(self, pointer: int) -> bool: ...


class MemoryRun(NamedTuple):
    """Equal runs of one process refer to the same memory. A piece is a chunk, or the whole
    allocation; the driver numbers each in `buffer_ids`."""

    base: int
    piece_nbytes: int
    buffer_ids: tuple[int, ...]
    is_chunked: bool

    @property
    def nbytes(self) -> int:
        return self.piece_nbytes * len(self.buffer_ids)

    def chunks(self) -> Iterator[tuple[int, int]]:
        for idx, number in enumerate(self.buffer_ids):
            yield self.base + idx * self.piece_nbytes, number


def find_runs(memory: AddressDriver, spans: Iterable[Sequence[int]]) -> list[MemoryRun]:
    """The runs that hold `spans` of addresses (first address, bytes), by address. Raises
    WeightSyncError if the driver does not know an address."""
    pieces: dict[int, tuple[int, int, bool]] = {}  # by first address: bytes, number, is a chunk
    for first, span_nbytes in spans:
        address = first
        while address < first + span_nbytes:
            base, nbytes = memory.address_range(address)
            if base not in pieces:
                pieces[base] = nbytes, memory.buffer_id(base), memory.is_chunk(base)
            address = base + nbytes
    runs: list[MemoryRun] = []
    for base in sorted(pieces):
        nbytes, number, is_chunk = pieces[base]
        last = runs[-1] if runs else None
        is_next = last is not None and base == last.base + last.nbytes
        if last and is_next and is_chunk and last.is_chunked and nbytes == last.piece_nbytes:
            runs[-1] = last._replace(buffer_ids=(*last.buffer_ids, number))
        else:
            runs.append(MemoryRun(base, nbytes, (number,), is_chunk))
    return runs


def locate(runs: Sequence[MemoryRun], pointer: int, nbytes: int) -> tuple[int, int]:
    """The index of the run that holds `nbytes` from `pointer` on, and the byte there. Raises
    WeightSyncError if no run holds all of them."""
    idx = bisect.bisect_right(runs, pointer, key=lambda run: run.base) - 1
    if idx < 0 or pointer + nbytes > runs[idx].base + runs[idx].nbytes:
        raise WeightSyncError(f"a tensor of {nbytes} bytes lies in chunks of different sizes")
    return idx, pointer - runs[idx].base
