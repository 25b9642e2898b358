"""Moves the trainer's tensors from its device to host memory while engines generate.

release_cache -> weights wake -> ranks fill their buckets -> send_away -> KV cache wakes
-> generate -> sleep -> bring_back -> train
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from umbra.runtime.errors import ConfigError
from umbra.runtime.process.host_memory import refusal
from umbra.runtime.weights.image.gpu_copies import lock_pages
from umbra.runtime.weights.shards import local_part
from umbra.trainer.model.train_model import TrainModel

Offload = Literal["none", "optimizer", "all"]


class HostOffload:
    """Owns the host copies, which are reused (`host_buffers`).

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
        storages = {_storage_key(tensor): tensor.untyped_storage() for tensor in self._tensors()}
        new = {key: each for key, each in storages.items() if key not in self._copies}
        sizes = [storage.nbytes() for storage in new.values()]
        buffers = host_buffers(sizes, on_gpu=self._device.type == "cuda")
        for (key, storage), buffer in zip(new.items(), buffers, strict=True):
            self._copies[key] = _HostCopy(storage, buffer)
        for key in storages:
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
            storage = tensor.untyped_storage()
            # On the CPU, where moving gains nothing, storages that numpy shares cannot be resized.
            if storage.nbytes() and storage.resizable():
                yield tensor


class _HostCopy:
    """The copy keeps the storage alive, which is empty while its bytes are on the host."""

    def __init__(self, storage: torch.UntypedStorage, buffer: Tensor) -> None:
        self._storage = storage
        self._bytes = buffer
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


def host_buffers(sizes: Sequence[int], *, on_gpu: bool) -> list[Tensor]:
    """[nbytes] uint8 in host memory for each of `sizes`. Those for copies of what is `on_gpu` are
    page-locked, until no view of them is left, or a warning says that CUDA cannot lock as much.
    Raises ConfigError if the kernel grants no more memory.

    torch rounds its own up to the next power of two (CachingHostAllocator): for the parameters of
    an 8B model on two GPUs, by a third.
    """
    buffers: list[Tensor] = []
    may_lock = on_gpu
    for nbytes in sizes:
        if not may_lock or nbytes == 0:
            buffers.append(torch.empty(nbytes, dtype=torch.uint8))
            continue
        try:
            memory = mmap.mmap(-1, nbytes)  # page-aligned, and shared, so that no fork copies it
        except OSError as error:
            need = f"copies of a GPU's memory need {nbytes / 2**30:.1f} GiB of the host's"
            raise ConfigError(f"{need}: {refusal(error)}") from error
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        buffers.append(buffer)
        may_lock = lock_pages(buffer.data_ptr(), nbytes, "copies of a GPU's memory")
        if may_lock:
            # The storage is freed with its last view; `memory` is kept until it has been unlocked.
            address = buffer.data_ptr()
            unlocking = weakref.finalize(buffer.untyped_storage(), _unlock, address, memory)
            unlocking.atexit = False  # the end of the process unlocks it sooner
    return buffers


def _unlock(address: int, _memory: mmap.mmap) -> None:
    cuda: Any = torch.cuda
    cuda.cudart().cudaHostUnregister(address)
