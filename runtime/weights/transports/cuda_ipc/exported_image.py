"""Reads the tensors of an image from the ranks' exports, without buckets.

manifest entry   |------------ w ------------|
parts            | rank 0    | rank 1  | r 2 |    each in memory of its rank, in its dtype
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.weights.manifest import ITEMSIZES, Manifest
from umbra.runtime.weights.transports.byte_views import flatten
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener, Opener
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import (
    Allocation,
    RankExports,
    TensorPart,
)

MakeOpener = Callable[[], Opener]


class Values(NamedTuple):
    """A part of one entry, opened: values [elements] belong to its elements from `start` on."""

    start: int
    values: Tensor


class ExportedImage:
    """One version as the ranks hold it. Owns the memory that it has opened, until `close`.

    Args:
        exports: of all ranks, by rank, in their wire form.

    Raises:
        ProtocolError: the exports are malformed.
        WeightSyncError: they are not, byte for byte, the tensors of the manifest.
    """

    def __init__(
        self, manifest: Manifest, exports: Sequence[object], make_opener: MakeOpener = CudaOpener
    ) -> None:
        self.manifest = manifest
        self._parts = _by_entry(manifest, [RankExports.from_wire(raw) for raw in exports])
        self._opener = make_opener()

    @classmethod
    def from_wire(cls, manifest: Mapping[str, Any], exports: Sequence[object]) -> ExportedImage:
        return cls(Manifest.from_wire(manifest), exports)

    def read(self, idx: int) -> list[Values]:
        """Entry `idx` in the exported memory; must be copied and released before `close`.

        Raises:
            WeightSyncError: memory cannot be opened.
        """
        entry, found = self.manifest.entries[idx], list[Values]()
        for part, allocation in self._parts[idx]:
            memory = self._opener.open(allocation)
            dtype: torch.dtype = getattr(torch, part.dtype)
            data = memory[part.start : part.start + part.span_nbytes].view(dtype)
            values = data.as_strided(part.shape, part.strides).reshape(-1)
            found.append(Values((part.offset - entry.offset) // ITEMSIZES[entry.dtype], values))
        return found

    @torch.no_grad()
    def assemble(self, idx: int, device: torch.device) -> Tensor:
        """Entry `idx` whole, in memory of its own: [shape] in the dtype of the manifest."""
        entry = self.manifest.entries[idx]
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        for start, values in self.read(idx):
            flatten(whole)[start : start + values.numel()].copy_(values)
        return whole

    def regions(self, idx: int) -> list[tuple[int, int]]:
        """Image offset and bytes of every part of entry `idx`."""
        itemsize = ITEMSIZES[self.manifest.entries[idx].dtype]
        return [(part.offset, _numel(part) * itemsize) for part, _ in self._parts[idx]]

    def close(self) -> None:
        """Waits for copies in progress, and closes the ranks' memory. Idempotent."""
        self._opener.close()


def _by_entry(
    manifest: Manifest, exports: Sequence[RankExports]
) -> list[list[tuple[TensorPart, Allocation]]]:
    """The parts of each entry, in order.

    Raises WeightSyncError unless they cover every byte of it once.
    """
    found: list[list[tuple[TensorPart, Allocation]]] = [[] for _ in manifest.entries]
    payloads = [idx for idx, entry in enumerate(manifest.entries) if entry.nbytes]
    offsets = [manifest.entries[idx].offset for idx in payloads]
    for exported in exports:
        for part in exported.parts:
            idx = bisect.bisect_right(offsets, part.offset) - 1
            if idx < 0:
                raise ProtocolError(f"a part at image byte {part.offset} belongs to no tensor")
            found[payloads[idx]].append((part, exported.allocations[part.allocation]))
    for entry, parts in zip(manifest.entries, found, strict=True):
        parts.sort(key=lambda item: item[0].offset)
        cursor = entry.offset
        for part, _ in parts:
            if part.offset != cursor:
                break
            cursor += _numel(part) * ITEMSIZES[entry.dtype]
        if cursor != entry.end:
            raise WeightSyncError(
                f"the ranks' exports do not cover tensor {entry.name!r}: bytes [{entry.offset}, "
                f"{entry.end}) of the image, and parts at {[part.offset for part, _ in parts][:8]}"
            )
    return found


def _numel(part: TensorPart) -> int:
    numel = 1
    for size in part.shape:
        numel *= size
    return numel
