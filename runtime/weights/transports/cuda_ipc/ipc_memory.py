"""Exports GPU memory of one process, and opens it in another.

A rank exports the allocations that contain its tensors. A process that opens one maps it whole and
closes it before the rank continues. Nothing counts readers: the sync itself determines when all
have read.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
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
    """Opens exported memory and owns it until `close`."""

    def open(self, allocation: Allocation) -> Tensor:
        """The whole allocation: uint8 [nbytes], not to be written to. The same tensor each time.

        Raises:
            WeightSyncError: it cannot be opened here.
        """
        ...

    def close(self) -> None:
        """Waits for its readers, and unmaps it. Idempotent."""
        ...


def export_tensors(tensors: Sequence[tuple[int, Tensor]]) -> Offer:
    """Exports tensors as parts, each with its offset in the image; or returns why it cannot.

    Work queued on their GPUs is done by then. The tensors must keep their memory and contents until
    the sync is over.
    """
    for _, tensor in tensors:
        if not tensor.is_cuda:
            return f"its tensors are in {tensor.device.type} memory, not on a GPU"
        if tensor.is_conj() or tensor.is_neg():
            return "one of its tensors is a view that negates or conjugates"
    try:
        return _Exporter().export(tensors)
    except WeightSyncError as error:
        return f"its memory cannot be exported: {error}"


class _Exporter:
    def __init__(self) -> None:
        self._uuids: list[bytes] = []
        self._allocations: list[Allocation] = []
        self._numbers: dict[int, int] = {}  # by first address

    def export(self, tensors: Sequence[tuple[int, Tensor]]) -> RankExports:
        parts: list[TensorPart] = []
        if tensors:
            self._uuids = cuda_driver().device_uuids()
        for device in sorted({tensor.device.index for _, tensor in tensors}):
            with _context_of(device):
                torch.cuda.synchronize()
                here = [item for item in tensors if item[1].device.index == device]
                parts += [self._part(offset, tensor) for offset, tensor in here]
        return RankExports(tuple(self._allocations), tuple(parts))

    def _part(self, offset: int, tensor: Tensor) -> TensorPart:
        pointer = tensor.data_ptr()
        base, nbytes = cuda_driver().address_range(pointer)
        if base not in self._numbers:
            self._numbers[base] = len(self._allocations)
            handle = cuda_driver().export(base)
            self._allocations.append(Allocation(self._uuids[tensor.device.index], handle, nbytes))
        return TensorPart(
            offset,
            self._numbers[base],
            pointer - base,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
        )


class CudaOpener:
    """Maps each allocation once, on the GPU that holds it.

    One thread opens, and may copy from what is open while it opens more.
    """

    def __init__(self) -> None:
        self._devices: dict[bytes, int] = {}  # GPUs whose context the thread has entered, by UUID
        self._opened: dict[Allocation, tuple[int, Tensor]] = {}  # address, memory

    def open(self, allocation: Allocation) -> Tensor:
        if allocation not in self._opened:
            device = self._enter(allocation.device)
            with torch.cuda.device(device):
                pointer = cuda_driver().open(allocation.handle)
                memory = torch.as_tensor(
                    _DeviceMemory(pointer, allocation.nbytes), device=f"cuda:{device}"
                )
            self._opened[allocation] = pointer, memory
        return self._opened[allocation][1]

    def close(self) -> None:
        devices, self._devices = self._devices, {}
        opened, self._opened = self._opened, {}
        for device in devices.values():
            torch.cuda.synchronize(device)
        if opened:
            torch.cuda.synchronize()  # copies to this process's own GPU
        for uuid, device in devices.items():
            with _context_of(device):
                for allocation, (pointer, _) in opened.items():
                    if allocation.device == uuid:
                        cuda_driver().close(pointer)

    def _enter(self, uuid: bytes) -> int:
        """The index of that GPU, whose context is entered the first time."""
        if uuid not in self._devices:
            device = _index_of(uuid)
            with _context_of(device):
                self._devices[uuid] = device
        return self._devices[uuid]


class _DeviceMemory:
    """Bytes on a GPU, in the form that torch accepts without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),  # torch refuses memory that is marked as read-only
            "strides": None,
            "version": 2,
        }


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


def _index_of(uuid: bytes) -> int:
    uuids = cuda_driver().device_uuids()
    if uuid not in uuids:
        raise WeightSyncError(
            f"the rank's GPU {uuid.hex()} is not among the {len(uuids)} that this process may use "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return uuids.index(uuid)


@contextmanager
def _context_of(device: int) -> Generator[None]:
    """Makes the driver's calls work on that GPU: torch enters its context with the first call."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        yield
