"""Exported memory without another process: storages of this one, opened by their handles."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.rank_exports import (
    HANDLE_NBYTES,
    UUID_NBYTES,
    Allocation,
    ChunksHandle,
    Offer,
    RankExports,
    TensorPart,
)
from umbra.runtime.weights.shards import dtype_name


class FakeIpc:
    """GPUs: `export` takes the place of `MemoryExporter`, `FakeOpener` of `CudaOpener`.

    What was exported once is never freed, so that no address is used again.

    Attributes:
        num_open: allocations that are open now.
        opened: allocations in the order in which they were opened.
        most_open: allocations that were open at once.
        unusable: why nothing can be opened, or "".
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.opened: list[Allocation] = []
        self.most_open = 0
        self.unusable = ""
        self._numbers = itertools.count()
        self._known: dict[int, Allocation] = {}  # by address
        self._exported: dict[bytes | ChunksHandle, Tensor] = {}

    def export(
        self,
        tensors: Sequence[tuple[int, Tensor]],
        replicas: Sequence[tuple[int, Tensor]] = (),
        gpu: int = 0,
    ) -> Offer:
        allocations: list[Allocation] = []
        parts: list[TensorPart] = []
        for offset, tensor in (*tensors, *replicas):
            storage = tensor.untyped_storage()
            allocation = self._allocation_of(storage, gpu)
            if allocation not in allocations:
                allocations.append(allocation)
            parts.append(
                TensorPart(
                    offset,
                    allocations.index(allocation),
                    tensor.data_ptr() - storage.data_ptr(),
                    dtype_name(tensor.dtype),
                    tuple(tensor.shape),
                    tensor.stride(),
                )
            )
        sent, rest = parts[: len(tensors)], parts[len(tensors) :]
        return RankExports(tuple(allocations), tuple(sent), tuple(rest))

    def _allocation_of(self, storage: torch.UntypedStorage, gpu: int) -> Allocation:
        address = storage.data_ptr()
        if address not in self._known:
            number = next(self._numbers)
            handle, device = number.to_bytes(HANDLE_NBYTES, "big"), gpu.to_bytes(UUID_NBYTES, "big")
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
            self._exported[handle] = memory.set_(storage)  # pyright: ignore[reportUnknownMemberType]
            self._known[address] = Allocation(device, handle, storage.nbytes(), number)
        return self._known[address]

    def memory(self, handle: bytes | ChunksHandle) -> Tensor:
        return self._exported[handle]


class FakeOpener:
    """Of a reader on one of the GPUs."""

    def __init__(self, ipc: FakeIpc, gpu: int = 0) -> None:
        self._ipc = ipc
        self._gpu = gpu
        self._open: dict[Allocation, Tensor] = {}

    def open(self, allocation: Allocation) -> Tensor:
        if self._ipc.unusable:
            raise WeightSyncError(self._ipc.unusable)
        if allocation not in self._open:
            self._ipc.num_open += 1
            self._ipc.most_open = max(self._ipc.most_open, self._ipc.num_open)
            self._ipc.opened.append(allocation)
            self._open[allocation] = self._ipc.memory(allocation.handle)
        return self._open[allocation]

    def device_uuid(self) -> bytes:
        return self._gpu.to_bytes(UUID_NBYTES, "big")

    def settle(self) -> None:
        """Copies on the CPU are done at once."""

    def keep(self, allocations: Collection[Allocation]) -> None:
        for allocation in self._open.keys() - set(allocations):
            del self._open[allocation]
            self._ipc.num_open -= 1

    def close(self) -> None:
        self.keep(())
