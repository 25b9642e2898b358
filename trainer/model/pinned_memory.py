"""Page-locked host memory of exactly the requested size.

torch rounds its own up to the next power of two (CachingHostAllocator): for the parameters of an 8B
model on two GPUs, by a third.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from umbra.runtime.errors import ConfigError


def pinned_bytes(nbytes: int) -> Tensor:
    """[nbytes] uint8, page-locked until the tensor and all its views are gone. Raises ConfigError
    if memory is short or CUDA cannot lock it."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, nbytes)  # page-aligned, and shared, so that no fork copies it
    except OSError as error:
        raise _too_little(nbytes, str(error)) from error
    locked = torch.frombuffer(memory, dtype=torch.uint8)
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    status = runtime.cudaHostRegister(locked.data_ptr(), nbytes, 0)
    if int(status) != 0:
        raise _too_little(nbytes, runtime.cudaGetErrorString(status))
    # The storage is freed with its last view; `memory` is kept until it has been unlocked.
    unlocking = weakref.finalize(locked.untyped_storage(), _unlock, locked.data_ptr(), memory)
    unlocking.atexit = False  # the end of the process unlocks it sooner
    return locked


def _unlock(address: int, _memory: mmap.mmap) -> None:
    cuda: Any = torch.cuda
    cuda.cudart().cudaHostUnregister(address)


def _too_little(nbytes: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{nbytes} bytes of host memory cannot be page-locked ({problem}): train.offload needs as "
        "much of it as it takes from the GPU; set train.offload to 'optimizer' or 'none'"
    )
