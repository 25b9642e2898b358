from __future__ import annotations

import itertools
import logging
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from umbra.runtime.weights.manifest import PIECE_NBYTES
from umbra.runtime.weights.shards import buffer_bytes

logger = logging.getLogger(__name__)

_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every GPU of the process
_MOST_UNDER_WAY: Final = 16
# Buckets whose copies have begun and not ended. Fewer leave the GPU waiting for the next copy; more
# report buckets no later, but hold that many events.


class GpuCopies:
    """The copies of one sync between an image and a GPU, on its current stream. On the CPU,
    copies are done when they return. `tell` is called with the number of buckets that are
    done, in order."""

    def __init__(self, device: torch.device, tell: Callable[[int], None]) -> None:
        self.is_on_gpu = device.type == "cuda"
        self._device = device
        self._tell = tell
        self._under_way: deque[tuple[torch.cuda.Event, int]] = deque()

    def mark(self, num_buckets: int) -> None:
        """Called when all copies of this many buckets have begun; reports finished ones."""
        if not self.is_on_gpu:
            self._tell(num_buckets)
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._under_way.append((event, num_buckets))
        while self._under_way and self._under_way[0][0].query():
            self._tell(self._under_way.popleft()[1])
        if len(self._under_way) > _MOST_UNDER_WAY:
            self._wait_first()

    def wait(self) -> None:
        """Returns when all copies are done and reported, even those after the last mark."""
        while self._under_way:
            self._wait_first()
        if self.is_on_gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def _wait_first(self) -> None:
        event, num_buckets = self._under_way.popleft()
        event.synchronize()
        self._tell(num_buckets)


def common_device(tensors: Iterable[Tensor]) -> torch.device:
    """The GPU that has all these tensors, or the CPU: then copies are done when they return."""
    devices = {tensor.device for tensor in tensors}
    only = next(iter(devices), torch.device("cpu"))
    return only if len(devices) == 1 else torch.device("cpu")


def cut_at_pieces(
    values: Tensor, target: Tensor, piece_nbytes: int = PIECE_NBYTES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cuts a copy from a view of an image at the edges of locked pieces: the driver may refuse a
    copy from pages that were not locked together. Views with gaps stay whole, because torch copies
    them to other memory first."""
    if not values.is_contiguous():  # torch copies a transposed view to a transposed one in place
        dims = sorted(range(values.ndim), key=lambda dim: -int(values.stride(dim)))
        values, target = values.permute(dims), target.permute(dims)
    start = int(values.storage_offset()) * values.itemsize
    edge = (start // piece_nbytes + 1) * piece_nbytes
    if not values.is_contiguous() or start + values.nbytes <= edge:
        yield values, target
        return
    dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
    row_nbytes, num_rows = int(values.stride(dim)) * values.itemsize, values.shape[dim]
    num_before, across = divmod(edge - start, row_nbytes)
    num_within = num_before + int(across > 0)
    bounds = (0, num_before, num_within, num_rows)
    for first, last in itertools.pairwise(bounds):
        if last > first:
            part = values.narrow(dim, first, last - first)
            yield from cut_at_pieces(part, target.narrow(dim, first, last - first), piece_nbytes)


def lock_pages(address: int, nbytes: int, what: str) -> bool:
    """Locks pages, so that a GPU copies at full speed and asynchronously. False, with a warning, if
    CUDA cannot lock them: copies then take longer."""
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    status = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(status) == 0:
        return True
    logger.warning(
        "%s are not page-locked, so that copies to and from GPUs take longer: %s",
        what,
        runtime.cudaGetErrorString(status),
    )
    with suppress(RuntimeError):  # torch raises the error once more, at its next kernel
        torch.zeros(1, device="cuda")
    return False


class PageLocks:
    """The locked pages of one mapping, in pieces. Owned by the `MappedImage`, which unlocks before
    it unmaps.

    If a piece cannot be locked, none stays locked, because no copy may be from memory that is
    partly locked.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._address = buffer_bytes(memory).data_ptr()
        self._locked: set[int] = set()  # offsets
        self._may_lock = True

    def lock(self, start: int, nbytes: int) -> None:
        if not self._may_lock or start in self._locked:
            return
        if lock_pages(self._address + start, nbytes, "weights in shared memory"):
            self._locked.add(start)
            return
        self._may_lock = False
        self.close()

    def close(self) -> None:
        """Waits for copies, and unlocks. Idempotent."""
        if not self._locked:
            return
        cuda: Any = torch.cuda
        torch.cuda.synchronize()
        while self._locked:
            cuda.cudart().cudaHostUnregister(self._address + self._locked.pop())
