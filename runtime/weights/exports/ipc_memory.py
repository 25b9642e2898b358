"""Exports GPU memory of one process, and opens it in another.

A rank exports the allocations that contain its tensors, and a process that opens one maps it whole.
Both keep them over syncs: the rank the handles, as long as the allocations exist, and the other
process the mappings, as long as the rank exports the same memory. The sync itself, not a count of
readers, determines when all have read. Memory of torch's expandable segments has descriptors
instead of a handle (`segment_memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError, UmbraError, WeightSyncError
from umbra.runtime.weights.exports.cuda_driver import cuda_driver
from umbra.runtime.weights.exports.segment_memory import (
    MemoryRun,
    deposit_chunks,
    find_runs,
    locate,
    map_chunks,
    unmap_chunks,
)
from umbra.runtime.weights.image.fd_server import FdDeposit, close_deposits
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.rank_exports import (
    Allocation,
    ChunksHandle,
    Offer,
    RankExports,
    TensorPart,
)
from umbra.runtime.weights.shards import SenderParts, ShardReader, dtype_name
from umbra.runtime.weights.sync_messages import Region, SyncGrant, remaining_s


class Opener(Protocol):
    """Opens exported memory and owns it. One thread at a time."""

    def open(self, allocation: Allocation) -> Tensor:
        """The whole allocation: uint8 [nbytes], not to be written to. The same tensor each time.
        Raises WeightSyncError if it cannot be opened here."""
        ...

    def device_uuid(self) -> bytes: ...

    def settle(self) -> None:
        """Returns when the copies that this thread has begun are done."""
        ...

    def keep(self, allocations: Collection[Allocation]) -> None:
        """Waits for readers of all other allocations, and unmaps those."""
        ...

    def close(self) -> None:
        """Unmaps all allocations. Idempotent."""
        ...


class _Exported(NamedTuple):
    run: MemoryRun
    allocation: Allocation
    deposit: FdDeposit | None

    @property
    def is_open(self) -> bool:
        """Whether others can still open it, if the run exists."""
        return self.deposit is None or self.deposit.is_kept


class MemoryExporter:
    """Exports tensors of this process. Allocations' handles stay for the next time.

    Owns the deposits of memory in expandable segments, at the node's descriptor server `fd_socket`,
    until `release` or the next export of other memory. Until then, memory that this process frees
    is not given back to the GPU.
    """

    def __init__(self, fd_socket: str) -> None:
        self._fd_socket = fd_socket
        self._known: dict[int, _Exported] = {}  # by first address
        self._views: Sequence[tuple[object, ...]] = ()
        self._exports = RankExports((), ())

    def export(
        self, tensors: Sequence[tuple[int, Tensor]], replicas: Sequence[tuple[int, Tensor]] = ()
    ) -> Offer:
        """Exports tensors as parts, each with its offset in the image; or returns why it cannot.

        Returns the same object as before if they have not moved. Work queued on their GPUs is done
        by then. The tensors must keep their memory and contents until the sync is over.
        """
        problem = _find_problem([tensor for _, tensor in (*tensors, *replicas)])
        if not problem:
            try:
                return self._export(tensors, replicas)
            except UmbraError as error:
                problem = f"its memory cannot be exported: {error}"
        self.release()
        return problem

    def release(self) -> None:
        """Ends all deposits; the next `export` makes new ones. Idempotent."""
        deposited = {base: each for base, each in self._known.items() if each.deposit is not None}
        for base in deposited:
            del self._known[base]
            self._views = ()
        _end_deposits(deposited.values())

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
            allocations = tuple(each.allocation for each in self._known.values())
            self._exports = RankExports(allocations, tuple(sent), tuple(rest))
            self._views = views
        return self._exports

    def _still_exist(self) -> bool:
        """Whether all known memory still exists, not other memory at its address, and
        can be opened."""
        find = cuda_driver().buffer_id
        return all(
            known.is_open and all(find(address) == number for address, number in known.run.chunks())
            for known in self._known.values()
        )

    def _export_views(
        self, tensors: Sequence[tuple[int, Tensor]], devices: Sequence[int]
    ) -> list[TensorPart]:
        known, self._known, self._views = self._known, {}, ()
        parts: dict[int, TensorPart] = {}
        try:
            for device in devices:
                on_device = [
                    (idx, tensor.data_ptr(), _span_nbytes(tensor))
                    for idx, (_, tensor) in enumerate(tensors)
                    if tensor.device.index == device
                ]
                num_before = len(self._known)
                with _context_of(device):
                    runs = find_runs(cuda_driver(), [span for _, *span in on_device])
                    for run in runs:
                        found = known.get(run.base)
                        if found is None or found.run != run or not found.is_open:
                            found = self._export_run(run, device)
                        self._known[run.base] = found
                for idx, pointer, nbytes in on_device:
                    number, start = locate(runs, pointer, nbytes)
                    parts[idx] = _part(*tensors[idx], num_before + number, start)
        finally:
            kept = {id(each) for each in self._known.values()}
            _end_deposits(each for each in known.values() if id(each) not in kept)
        return [parts[idx] for idx in range(len(tensors))]

    def _export_run(self, run: MemoryRun, device: int) -> _Exported:
        driver = cuda_driver()
        uuid, buffer_id = driver.device_uuids()[device], run.buffer_ids[0]
        if not run.is_chunked:
            handle = driver.export(run.base)
            return _Exported(run, Allocation(uuid, handle, run.nbytes, buffer_id), None)
        segment, deposit = deposit_chunks(driver, run, self._fd_socket)
        return _Exported(run, Allocation(uuid, segment, run.nbytes, buffer_id), deposit)


def _find_problem(tensors: Sequence[Tensor]) -> str:
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"its tensors are in {tensor.device.type} memory, not on a GPU"
        if tensor.is_conj() or tensor.is_neg():
            return "one of its tensors is a view that negates or conjugates"
    return ""


def _end_deposits(exported: Iterable[_Exported]) -> None:
    close_deposits([each.deposit for each in exported if each.deposit is not None])


def _span_nbytes(tensor: Tensor) -> int:
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _part(offset: int, tensor: Tensor, allocation: int, start: int) -> TensorPart:
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    return TensorPart(offset, allocation, start, dtype, shape, tensor.stride())


class CudaOpener:
    """Maps each allocation once for torch's current device, whichever GPU holds it. A GPU then
    reads another one's memory directly, and the process needs no context there."""

    def __init__(self) -> None:
        self._device = -1
        self._opened: dict[Allocation, tuple[int, Tensor]] = {}  # address, memory

    def open(self, allocation: Allocation) -> Tensor:
        if allocation not in self._opened:
            _check_visible(allocation.device)
            self._device = torch.cuda.current_device()
            with _context_of(self._device):
                pointer = _map(allocation, self._device)
                try:
                    memory = _memory_at(pointer, allocation.nbytes, self._device)
                except BaseException:
                    _unmap(allocation, pointer)
                    raise
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
                _unmap(allocation, self._opened.pop(allocation)[0])

    def close(self) -> None:
        self.keep(())


def _map(allocation: Allocation, device: int) -> int:
    if isinstance(allocation.handle, ChunksHandle):
        return map_chunks(cuda_driver(), allocation.handle, allocation.nbytes, device)
    return cuda_driver().open(allocation.handle)


def _unmap(allocation: Allocation, pointer: int) -> None:
    if isinstance(allocation.handle, ChunksHandle):
        unmap_chunks(cuda_driver(), pointer, allocation.nbytes)
    else:
        cuda_driver().close(pointer)


def _memory_at(pointer: int, nbytes: int, device: int) -> Tensor:
    """Bytes at an address that a GPU can read, as memory of this GPU: uint8 [nbytes]. torch's
    public ways (2.11) ask the driver which GPU holds them."""
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


class ExportSender:
    """CUDA IPC, a rank's part: exports its tensors and replicas, which stay in memory until the
    engines have loaded, or until the next sync with `keeps_memory`."""

    network_nbytes = 0

    def __init__(self, parts: SenderParts) -> None:
        self._shards = parts.shards
        self._replicas = parts.replicas
        exporter = MemoryExporter(parts.session.fd_socket)
        self._export = parts.export or exporter.export
        self._release = exporter.release  # ends holds on memory that the rank may free
        self._keeps_memory = parts.keeps_memory
        self._exported: Offer = ""
        self._offer: bytes | str = ""

    def offer(self) -> bytes | str:
        """The exports of this rank in their wire form, or why there are none; the same object as
        long as neither the tensors nor their memory have changed."""
        exported = self._export(self._shards.located(), self._replicas.located())
        if exported is not self._exported:
            self._exported = exported
            if isinstance(exported, RankExports):
                self._offer = replace(exported, keeps_memory=self._keeps_memory).to_wire()
            else:
                self._offer = exported
        return self._offer

    @torch.no_grad()
    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Reports that all tensors are ready, as since the offer; with checksums,
        also the replicas."""
        shards = self._shards
        num_entries = len(shards.manifest.entries)
        if num_entries != grant.num_buckets:
            raise ProtocolError(
                f"rank {shards.rank} publishes {num_entries} tensors, "
                f"rank 0 {grant.num_buckets}: their tensors differ"
            )
        left_s = remaining_s(deadline)
        fd_socket, wire = grant.details["fd_socket"], grant.details["progress"]
        progress = SyncProgress.receive_open(fd_socket, wire, left_s)
        if progress is None:
            return None
        try:
            progress.set_filled(shards.rank, num_entries)
            if not grant.has_checksums:
                return [(extent.offset, extent.nbytes, None) for extent in shards.extents]
            return [
                (extent.offset, extent.nbytes, checksum)
                for held in (shards, self._replicas)
                for extent, checksum in zip(
                    held.extents, ShardReader(held).read_checksums(), strict=True
                )
            ]
        finally:
            progress.close()

    def leave(self) -> None:
        if not self._keeps_memory:
            self._release()

    def close(self) -> None:
        self._release()
