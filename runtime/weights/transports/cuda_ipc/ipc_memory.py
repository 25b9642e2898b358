"""Exports GPU memory of one process, and opens it in another.

A rank exports the allocations that contain its tensors, and a process that opens one maps it whole.
Both keep what they have over syncs: the rank the handles, as long as the allocations exist, and the
other process the mappings, as long as the rank exports the same memory. Nothing counts readers: the
sync itself determines when all have read.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.weights.transports.byte_views import dtype_name
from umbra.runtime.weights.transports.cuda_ipc.cuda_driver import cuda_driver
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import (
    Allocation,
    Offer,
    RankExports,
    TensorPart,
)


class Opener(Protocol):
    """Opens exported memory and owns it. One thread at a time."""

    def open(self, allocation: Allocation) -> Tensor:
        """The whole allocation: uint8 [nbytes], not to be written to. The same tensor each time.

        Raises:
            WeightSyncError: it cannot be opened here.
        """
        ...

    def device_uuid(self) -> bytes:
        """The UUID of the GPU that reads."""
        ...

    def settle(self) -> None:
        """Returns when the copies that this thread has begun are done."""
        ...

    def keep(self, allocations: Collection[Allocation]) -> None:
        """Waits for readers of all other allocations, and unmaps those."""
        ...

    def close(self) -> None:
        """Keeps none. Idempotent."""
        ...


class MemoryExporter:
    """Exports tensors of this process. Keeps the handles of their allocations for the next time."""

    def __init__(self) -> None:
        self._known: dict[int, Allocation] = {}  # by first address
        self._views: Sequence[tuple[object, ...]] = ()
        self._exports = RankExports((), ())

    def export(
        self, tensors: Sequence[tuple[int, Tensor]], replicas: Sequence[tuple[int, Tensor]] = ()
    ) -> Offer:
        """Exports tensors as parts, each with its offset in the image; or returns why it cannot.

        Returns the same object as before if they are where they were. Work queued on their GPUs is
        done by then. The tensors must keep their memory and contents until the sync is over.
        """
        for _, tensor in (*tensors, *replicas):
            if not tensor.is_cuda:
                return f"its tensors are in {tensor.device.type} memory, not on a GPU"
            if tensor.is_conj() or tensor.is_neg():
                return "one of its tensors is a view that negates or conjugates"
        try:
            return self._export(tensors, replicas)
        except WeightSyncError as error:
            return f"its memory cannot be exported: {error}"

    def _export(
        self, tensors: Sequence[tuple[int, Tensor]], replicas: Sequence[tuple[int, Tensor]]
    ) -> RankExports:
        held = [*tensors, *replicas]
        views = [(offset, t.data_ptr(), t.dtype, t.shape, t.stride()) for offset, t in held]
        is_same = views == self._views
        devices = sorted({tensor.device.index for _, tensor in held})
        for device in devices:
            with _context_of(device):
                torch.cuda.synchronize()
                is_same = is_same and self._still_exist()
        if not is_same:
            parts = self._export_views(held, devices)
            sent, rest = parts[: len(tensors)], parts[len(tensors) :]
            self._exports = RankExports(tuple(self._known.values()), tuple(sent), tuple(rest))
            self._views = views
        return self._exports

    def _still_exist(self) -> bool:
        """Whether no known allocation was freed; another one may have its address."""
        find = cuda_driver().buffer_id
        return all(find(base) == known.buffer_id for base, known in self._known.items())

    def _export_views(
        self, tensors: Sequence[tuple[int, Tensor]], devices: Sequence[int]
    ) -> list[TensorPart]:
        """Their parts, in the same order."""
        known, self._known, self._views = self._known, {}, ()
        numbers: dict[int, int] = {}  # by first address
        parts: dict[int, TensorPart] = {}
        for device in devices:
            driver = cuda_driver()
            uuid = driver.device_uuids()[device]
            with _context_of(device):
                for idx, (offset, tensor) in enumerate(tensors):
                    if tensor.device.index != device:
                        continue
                    pointer = tensor.data_ptr()
                    base, nbytes = driver.address_range(pointer)
                    if base not in numbers:
                        numbers[base] = len(numbers)
                        buffer_id, found = driver.buffer_id(base), known.get(base)
                        if found is None or found.buffer_id != buffer_id:
                            handle = driver.export(base)
                            found = Allocation(uuid, handle, nbytes, buffer_id)
                        self._known[base] = found
                    parts[idx] = _part(offset, tensor, numbers[base], pointer - base)
        return [parts[idx] for idx in range(len(tensors))]


def _part(offset: int, tensor: Tensor, allocation: int, start: int) -> TensorPart:
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    return TensorPart(offset, allocation, start, dtype, shape, tensor.stride())


class CudaOpener:
    """Maps each allocation once for torch's current device, whichever GPU holds it.

    A GPU then reads the memory of another one directly, and the process needs no context there.
    """

    def __init__(self) -> None:
        self._device = -1
        self._opened: dict[Allocation, tuple[int, Tensor]] = {}  # address, memory

    def open(self, allocation: Allocation) -> Tensor:
        if allocation not in self._opened:
            _check_visible(allocation.device)
            self._device = torch.cuda.current_device()
            with _context_of(self._device):
                pointer = cuda_driver().open(allocation.handle)
                memory = _memory_at(pointer, allocation.nbytes, self._device)
            self._opened[allocation] = pointer, memory
        return self._opened[allocation][1]

    def device_uuid(self) -> bytes:
        return cuda_driver().device_uuids()[torch.cuda.current_device()]

    def settle(self) -> None:
        if self._opened:
            torch.cuda.current_stream(self._device).synchronize()

    def keep(self, allocations: Collection[Allocation]) -> None:
        others = self._opened.keys() - set(allocations)
        if not others:
            return
        with _context_of(self._device):
            torch.cuda.synchronize()
            for allocation in others:
                cuda_driver().close(self._opened.pop(allocation)[0])

    def close(self) -> None:
        self.keep(())


def _memory_at(pointer: int, nbytes: int, device: int) -> Tensor:
    """Bytes at an address that a GPU can read, as memory of this GPU: uint8 [nbytes].

    torch's public ways (2.11) ask the driver which GPU holds them.
    """
    make: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]
    empty = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return empty.set_(make(pointer, empty.device, nbytes))  # pyright: ignore[reportUnknownMemberType]


def probe_import(raw: Sequence[object]) -> str:
    """Why allocations, in wire form, cannot be opened in this process, or ""."""
    opener = CudaOpener()
    try:
        for allocation in raw:
            memory = opener.open(Allocation.from_wire(allocation))
            memory[:1].cpu()
    except (WeightSyncError, ProtocolError) as error:
        return str(error)
    except RuntimeError as error:  # torch cannot use CUDA, or not this memory
        return f"torch: {error}"[:500]
    finally:
        opener.close()
    return ""


def _check_visible(uuid: bytes) -> None:
    uuids = cuda_driver().device_uuids()
    if uuid not in uuids:
        raise WeightSyncError(
            f"the rank's GPU {uuid.hex()} is not among the {len(uuids)} that this process may use "
            "(CUDA_VISIBLE_DEVICES)"
        )


@contextmanager
def _context_of(device: int) -> Generator[None]:
    """Makes the driver's calls work on that GPU. Another GPU's context is entered with the device,
    the current one's with the first call of this thread that needs it."""
    with torch.cuda.device(device):
        if not cuda_driver().has_context():
            torch.cuda.current_stream().synchronize()
        yield
