"""Exported memory without a GPU: CPU storages of this process, opened by their handles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.byte_views import dtype_name
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import (
    HANDLE_NBYTES,
    UUID_NBYTES,
    Allocation,
    Offer,
    RankExports,
    TensorPart,
)


class FakeIpc:
    """One GPU: `export` takes the place of `export_tensors`, `FakeOpener` of `CudaOpener`.

    Attributes:
        num_open: allocations that are open now.
        opened: handles in the order in which they were opened.
        unusable: why nothing can be opened, or "".
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.opened: list[bytes] = []
        self.unusable = ""
        self._handles = itertools.count()
        self._exported: dict[bytes, Tensor] = {}

    def export(self, tensors: Sequence[tuple[int, Tensor]]) -> Offer:
        allocations: dict[int, Allocation] = {}
        parts: list[TensorPart] = []
        for offset, tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in allocations:
                handle = next(self._handles).to_bytes(HANDLE_NBYTES, "big")
                self._exported[handle] = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportUnknownMemberType]
                device = bytes(UUID_NBYTES)
                allocations[storage.data_ptr()] = Allocation(device, handle, storage.nbytes())
            parts.append(
                TensorPart(
                    offset,
                    list(allocations).index(storage.data_ptr()),
                    tensor.data_ptr() - storage.data_ptr(),
                    dtype_name(tensor.dtype),
                    tuple(tensor.shape),
                    tensor.stride(),
                )
            )
        return RankExports(tuple(allocations.values()), tuple(parts))

    def memory(self, handle: bytes) -> Tensor:
        return self._exported[handle]


class FakeOpener:
    def __init__(self, ipc: FakeIpc) -> None:
        self._ipc = ipc
        self._open: dict[Allocation, Tensor] = {}

    def open(self, allocation: Allocation) -> Tensor:
        if self._ipc.unusable:
            raise WeightSyncError(self._ipc.unusable)
        if allocation not in self._open:
            self._ipc.num_open += 1
            self._ipc.opened.append(allocation.handle)
            self._open[allocation] = self._ipc.memory(allocation.handle)
        return self._open[allocation]

    def close(self) -> None:
        self._ipc.num_open -= len(self._open)
        self._open = {}
