from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from umbra.runtime.errors import ConfigError
from umbra.runtime.weights.transports.shared_memory.pages import populate_range, trim_heap


class Arena:
    """One flat range of device memory that can be freed while its tensors stay valid.

    Weights and KV cache are views of it. `release` frees the pages but keeps the addresses,
    so every view is good again after `restore`. The memory is zero-filled at first and
    after a restore.

    On the CPU it is an anonymous mapping: pages count as resident once touched, and MADV_DONTNEED
    frees them at once. On CUDA the storage is resized to nothing and back.
    """

    def __init__(self, size_nbytes: int, device: torch.device) -> None:
        self.size_nbytes = max(size_nbytes, 1)
        self.is_resident = True
        self._device = device
        self._mapping: mmap.mmap | None = None
        if device.type == "cpu":
            # Private: the pages of a shared mapping would outlive MADV_DONTNEED.
            try:
                self._mapping = mmap.mmap(-1, self.size_nbytes, flags=mmap.MAP_PRIVATE)
            except OSError as error:
                raise ConfigError(
                    f"this machine cannot provide {size_nbytes / 1e9:.1f} GB of memory ({error}); "
                    "lower kv_cache_num_tokens, max_num_seqs or max_context_len"
                ) from error
            # Attention strides over the whole cache: with small pages, address translations alone
            # cost a third of a small model's decode step.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)  # [size_nbytes]
        else:
            self.data = torch.zeros(self.size_nbytes, dtype=torch.uint8, device=device)

    def view(self, offset_nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The offset must be a multiple of the element size."""
        size_nbytes = math.prod(shape) * dtype.itemsize
        return self.data[offset_nbytes : offset_nbytes + size_nbytes].view(dtype).view(shape)

    def populate(self) -> None:
        if self._mapping is not None:
            populate_range(self.data.data_ptr(), self.size_nbytes)

    def release(self) -> None:
        """Frees the memory; contents are lost. Views must not be read until `restore`."""
        if not self.is_resident:
            return
        self.is_resident = False
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            trim_heap()
        else:
            self.data.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def restore(self) -> None:
        if self.is_resident:
            return
        if self._mapping is None:
            self.data.untyped_storage().resize_(self.size_nbytes)
            self.data.zero_()
        self.is_resident = True
