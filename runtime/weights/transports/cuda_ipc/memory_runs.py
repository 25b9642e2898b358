"""Finds the memory that holds tensors, as runs that are exported as one. Torch-free.

    tensors          |--a--|   |-----b-----|           |-c-|
    chunks       | 0    | 1    | 2    | 3    | 4    | 5    |
    runs         |            0              |      |  1   |

An allocation of cudaMalloc is a run by itself. torch's expandable segments consist of physical
chunks that are adjacent in address space, and a tensor may begin and end anywhere in them: a run is
as many adjacent chunks of the same size as hold tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from umbra.runtime.errors import WeightSyncError


class AddressDriver(Protocol):
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
