from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from typing import Any, Final

import torch

from umbra.runtime.weights.byte_views import buffer_bytes

logger = logging.getLogger(__name__)

_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every GPU of the process


class PageLocks:
    """The locked pages of one mapping, in pieces, so that a GPU copies at full speed and
    asynchronously. Owned by the `MappedImage`, which unlocks before it unmaps.

    If a piece cannot be locked, none stays locked, because no copy may be from memory that is
    partly locked. Copies then take longer.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._address = buffer_bytes(memory).data_ptr()
        self._locked: set[int] = set()  # offsets
        self._may_lock = True

    def lock(self, start: int, nbytes: int) -> None:
        if not self._may_lock or start in self._locked:
            return
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        status = runtime.cudaHostRegister(self._address + start, nbytes, _PORTABLE)
        if int(status) == 0:
            self._locked.add(start)
            return
        self._may_lock = False
        logger.warning(
            "weights in shared memory are not page-locked, so that copies to and from GPUs take "
            "longer: %s",
            runtime.cudaGetErrorString(status),
        )
        with suppress(RuntimeError):  # torch raises the error once more, at its next kernel
            torch.zeros(1, device="cuda")
        self.close()

    def close(self) -> None:
        """Waits for copies, and unlocks. Idempotent."""
        if not self._locked:
            return
        cuda: Any = torch.cuda
        torch.cuda.synchronize()
        while self._locked:
            cuda.cudart().cudaHostUnregister(self._address + self._locked.pop())
