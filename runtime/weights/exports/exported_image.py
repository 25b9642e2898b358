"""Reads the tensors of an image from the ranks' exports, without buckets.

manifest entry   |------------ w ------------|
parts            | rank 0    | rank 1  | r 2 |    each in memory of its rank, in its dtype
replicas         | rank 3    | rank 4  | r 5 |    read in place of a part on another GPU
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.exports.ipc_memory import CudaOpener, Opener
from umbra.runtime.weights.manifest import ITEMSIZES, Manifest, TensorEntry
from umbra.runtime.weights.rank_exports import Allocation, RankExports, TensorPart
from umbra.runtime.weights.shards import flatten

_LocatedPart = tuple[TensorPart, Allocation]

MakeOpener = Callable[[], Opener]


class Values(NamedTuple):
    """An opened part of one entry: values [elements] belong to its elements from `start` on."""

    start: int
    values: Tensor


class ExportedImage:
    """Versions as the ranks hold them, all in the same memory, from all ranks' exports in their
    wire form. Raises ProtocolError for malformed exports, WeightSyncError if they do not make
    up the manifest."""

    def __init__(self, manifest: Manifest, exports: Sequence[object], opener: Opener) -> None:
        ranks = [RankExports.from_wire(raw) for raw in exports]
        self.manifest = manifest
        self.allocations = frozenset(each for rank in ranks for each in rank.allocations)
        self.keeps_memory = all(rank.keeps_memory for rank in ranks)
        own_gpu = opener.device_uuid()
        replicas = {
            (part.offset, part.shape): (part, allocation)
            for rank in ranks
            for part, allocation in _located(rank, rank.replicas)
            if allocation.device == own_gpu
        }
        sent = [each for rank in ranks for each in _located(rank, rank.parts)]
        self._parts = [
            [
                (part, allocation)
                if allocation.device == own_gpu
                else replicas.get((part.offset, part.shape), (part, allocation))
                for part, allocation in parts
            ]
            for parts in _by_entry(manifest, sent)
        ]
        self._regions = [
            [(part.offset, _nbytes(part, entry)) for part, _ in parts]
            for entry, parts in zip(manifest.entries, self._parts, strict=True)
        ]
        self._opener = opener

    def read(self, idx: int) -> list[Values]:
        """Entry `idx` in the exported memory. Raises WeightSyncError if memory cannot be opened."""
        entry, found = self.manifest.entries[idx], list[Values]()
        for number, (part, _) in enumerate(self._parts[idx]):
            values = self.part(idx, number).reshape(-1)
            found.append(Values((part.offset - entry.offset) // ITEMSIZES[entry.dtype], values))
        return found

    def part(self, idx: int, number: int) -> Tensor:
        """One part of entry `idx`: [the rank's shape], in its dtype and with its strides."""
        part, allocation = self._parts[idx][number]
        memory = self._opener.open(allocation)
        dtype: torch.dtype = getattr(torch, part.dtype)
        data = memory[part.start : part.start + part.span_nbytes].view(dtype)
        return data.as_strided(part.shape, part.strides)

    def blocks(self, idx: int) -> list[ShardBlock]:
        """The parts of entry `idx` as disjoint blocks; empty if rows of a part differ in shape."""
        entry = self.manifest.entries[idx]
        found = [_block(entry, part) for part, _ in self._parts[idx]]
        return [block for block in found if block is not None] if None not in found else []

    @torch.no_grad()
    def assemble(self, idx: int, device: torch.device) -> Tensor:
        """Entry `idx` whole, in memory of its own: [shape] in the dtype of the manifest."""
        entry = self.manifest.entries[idx]
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        for start, values in self.read(idx):
            flatten(whole)[start : start + values.numel()].copy_(values)
        return whole

    def regions(self, idx: int) -> list[tuple[int, int]]:
        return self._regions[idx]


def _located(rank: RankExports, parts: Sequence[TensorPart]) -> Iterator[_LocatedPart]:
    for part in parts:
        yield part, rank.allocations[part.allocation]


def _by_entry(manifest: Manifest, sent: Iterable[_LocatedPart]) -> list[list[_LocatedPart]]:
    """The parts of each entry, in order. Raises WeightSyncError unless they cover every byte once,
    ProtocolError for a part of no entry."""
    found: list[list[_LocatedPart]] = [[] for _ in manifest.entries]
    payloads = [idx for idx, entry in enumerate(manifest.entries) if entry.nbytes]
    offsets = [manifest.entries[idx].offset for idx in payloads]
    for part, allocation in sent:
        idx = bisect.bisect_right(offsets, part.offset) - 1
        if idx < 0:
            raise ProtocolError(f"a part at image byte {part.offset} belongs to no tensor")
        found[payloads[idx]].append((part, allocation))
    for entry, parts in zip(manifest.entries, found, strict=True):
        parts.sort(key=lambda each: each[0].offset)
        starts = [part.offset for part, _ in parts]
        ends = [part.offset + _nbytes(part, entry) for part, _ in parts]
        if [*starts, entry.end] != [entry.offset, *ends]:
            raise WeightSyncError(
                f"the ranks' exports do not cover tensor {entry.name!r}: bytes [{entry.offset}, "
                f"{entry.end}) of the image once: it has parts at {starts[:8]} to {ends[:8]}"
            )
    return found


def _nbytes(part: TensorPart, entry: TensorEntry) -> int:
    return math.prod(part.shape) * ITEMSIZES[entry.dtype]


def _block(entry: TensorEntry, part: TensorPart) -> ShardBlock | None:
    if part.shape[1:] != entry.shape[1:] or len(part.shape) != len(entry.shape):
        return None
    row_nbytes = math.prod(entry.shape[1:]) * ITEMSIZES[entry.dtype]
    row, rest = divmod(part.offset - entry.offset, row_nbytes)
    starts = (row, *(0 for _ in entry.shape[1:]))[: len(entry.shape)]
    return None if rest else ShardBlock(starts, part.shape)


class OpenedMemory:
    """The ranks' memory as one engine process has it open, over syncs. Owns it. One thread at a
    time.

        image ─▶ reads, copies ─▶ leave        once for each version
        close                                  ranks may have ended, or weights come another way

    Memory that the ranks export again in the next sync stays open. All other memory is closed at
    the beginning of that sync, before anything new is opened.
    """

    def __init__(self, make_opener: MakeOpener = CudaOpener) -> None:
        self._opener = make_opener()
        self._described: tuple[bytes, Sequence[object]] | None = None
        self._image: ExportedImage | None = None

    def image(self, manifest: bytes, exports: Sequence[object]) -> ExportedImage:
        """The ranks' exports of a sync; both arguments are in their wire form. The same object
        as before if the same tensors are in the same memory: then everything read from it is
        still in place."""
        described = manifest, exports
        if self._image is None or described != self._described:
            self._image = None
            image = ExportedImage(Manifest.from_wire(manifest), exports, self._opener)
            self._opener.keep(image.allocations)
            self._described, self._image = described, image
        return self._image

    def leave(self) -> None:
        """Ends a sync: waits for copies, and closes memory that does not stay. Idempotent."""
        self._opener.settle()
        if self._image is not None and not self._image.keeps_memory:
            self.close()

    def close(self) -> None:
        self._image = None
        self._opener.close()
