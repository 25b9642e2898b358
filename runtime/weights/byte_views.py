from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def flatten(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as [N] with stride 1; shares memory with it.
    reshape(-1) keeps odd strides if there is at most one element, and such tensors cannot be
    viewed as bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def typed_view(data: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """Bytes, uint8 [nbytes], as a contiguous tensor of that dtype, by its name in a manifest."""
    return data.view(getattr(torch, dtype)).view(torch.Size(shape))


def buffer_bytes(buffer: mmap.mmap | NDArray[np.uint8]) -> Tensor:
    """The bytes of a bucket's memory, uint8 [nbytes]; a mapping stays mapped while the view lives,
    by numpy. torch.frombuffer (2.13) does not keep it: closing the mapping under it causes a
    segmentation fault."""
    return torch.as_tensor(np.frombuffer(buffer, dtype=np.uint8))
