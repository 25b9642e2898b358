"""Moves the trainer's tensors from its device to host memory while engines generate.

release_cache -> weights wake -> ranks fill their buckets -> send_away -> KV cache wakes
-> generate -> sleep -> bring_back -> train
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, Literal

import torch
from torch import Tensor

from umbra.runtime.errors import ConfigError
from umbra.runtime.weights.shards import local_part
from umbra.trainer.model.train_model import TrainModel

Offload = Literal["none", "optimizer", "all"]

_REMEDY: Final = (
    "train.offload needs as much of it as it takes from the GPU; set it to 'optimizer' or 'none'"
)


class HostOffload:
    """Owns the host copies, which are reused (and pinned if the device is CUDA).

    Each rank moves its own shards; nothing here is collective. Storages shrink to nothing and
    grow again under the tensors, so parameters, FSDP's views and the optimizer's state stay
    the same objects. Between `send_away` and `bring_back`, only `locate` may read them.
    Optimizers may get their state later.
    """

    def __init__(self, mode: Offload, models: Collection[TrainModel], device: torch.device) -> None:
        self.is_away = False
        self._mode = mode
        self._models = models
        self._device = device
        self._copies: dict[int, _HostCopy] = {}
        self._seconds = 0.0

    def release_cache(self) -> None:
        """Releases the device memory that torch's allocator caches, which no other process, such
        as an engine that wakes, could use. After a training step it is what gradients and
        activations took."""
        if self._device.type != "cuda":
            return
        started = time.perf_counter()
        torch.cuda.empty_cache()
        self._seconds += time.perf_counter() - started

    @torch.no_grad()
    def send_away(self) -> None:
        """Moves what `mode` names to the host, and releases the cache. Idempotent."""
        if self.is_away:
            return
        if self._mode != "none":
            self._move_away()
        self.release_cache()

    def _move_away(self) -> None:
        started = time.perf_counter()
        for tensor in self._tensors():
            key = _storage_key(tensor)
            if key not in self._copies:
                self._copies[key] = _HostCopy(tensor.untyped_storage())
            self._copies[key].send_away()
        self.is_away = True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # host copies are read without the stream
        self._seconds += time.perf_counter() - started

    @torch.no_grad()
    def bring_back(self) -> None:
        """Call it once engines have released their memory. Idempotent."""
        if not self.is_away:
            return
        started = time.perf_counter()
        for copy in self._copies.values():
            copy.bring_back()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.is_away = False
        self._seconds += time.perf_counter() - started

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters have other memory after each stay on the host."""
        return self._mode == "all"

    def locate(self, tensor: Tensor) -> Tensor:
        """This rank's part of `tensor`, on device or host; for reading only."""
        local = local_part(tensor)
        copy = self._copies.get(_storage_key(local))
        return local if copy is None or not copy.is_away else copy.view_as(local)

    def take_seconds(self) -> float:
        """Seconds spent on moving and releasing since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _tensors(self) -> Iterator[Tensor]:
        candidates: list[Tensor] = []
        if self._mode == "all":
            candidates += [p for model in self._models for p in model.parameters.values()]
        for optimizer in [model.optimizer for model in self._models if model.optimizer]:
            candidates += [value for value in optimizer.states.values() if value.ndim > 0]
        for tensor in map(local_part, candidates):
            storage = tensor.untyped_storage()  # empty if another tensor of it was sent away
            # On the CPU, where moving gains nothing, storages that numpy shares cannot be resized.
            if storage.nbytes() and storage.resizable():
                yield tensor


class _HostCopy:
    """The copy keeps the storage alive, which is empty while its bytes are on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        nbytes = storage.nbytes()
        is_pinned = storage.device.type == "cuda"
        self._bytes = pinned_bytes(nbytes) if is_pinned else torch.empty(nbytes, dtype=torch.uint8)
        self.is_away = False

    def send_away(self) -> None:
        self._bytes.copy_(self._device_bytes(), non_blocking=True)
        self._storage.resize_(0)  # on CUDA the memory is reused in stream order, after the copy
        self.is_away = True

    def bring_back(self) -> None:
        if self.is_away:
            self._storage.resize_(len(self._bytes))
            self._device_bytes().copy_(self._bytes, non_blocking=True)
            self.is_away = False

    def view_as(self, local: Tensor) -> Tensor:
        whole = self._bytes.view(local.dtype)
        return whole.as_strided(local.shape, local.stride(), local.storage_offset())

    def _device_bytes(self) -> Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        put: Callable[[torch.UntypedStorage], Tensor] = empty.set_
        return put(self._storage)


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]


def pinned_bytes(nbytes: int, remedy: str = _REMEDY) -> Tensor:
    """[nbytes] uint8, page-locked until the tensor and all its views are gone. Raises ConfigError
    with that remedy if memory is short or CUDA cannot lock it.

    torch rounds its own up to the next power of two (CachingHostAllocator): for the parameters of
    an 8B model on two GPUs, by a third.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, nbytes)  # page-aligned, and shared, so that no fork copies it
    except OSError as error:
        raise _too_little(nbytes, str(error), remedy) from error
    locked = torch.frombuffer(memory, dtype=torch.uint8)
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    status = runtime.cudaHostRegister(locked.data_ptr(), nbytes, 0)
    if int(status) != 0:
        raise _too_little(nbytes, runtime.cudaGetErrorString(status), remedy)
    # The storage is freed with its last view; `memory` is kept until it has been unlocked.
    unlocking = weakref.finalize(locked.untyped_storage(), _unlock, locked.data_ptr(), memory)
    unlocking.atexit = False  # the end of the process unlocks it sooner
    return locked


def _unlock(address: int, _memory: mmap.mmap) -> None:
    cuda: Any = torch.cuda
    cuda.cudart().cudaHostUnregister(address)


def _too_little(nbytes: int, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"{nbytes} bytes of host memory cannot be page-locked ({problem}): {remedy}")
