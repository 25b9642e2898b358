"""The checksum of tensor bytes: XXH3, 64 bits.

Not cryptographic: it finds what copies get wrong. Measured on one core of an AMD EPYC (Zen 5):
34 GB/s, against 4.3 GB/s of zlib.crc32. The bytes decide, never the device or the dtype.
"""

from __future__ import annotations

from typing import Final

import torch
import xxhash
from torch import Tensor

# What is summed, then copied while it is still in the core's cache.
_CHUNK_NBYTES: Final = 1 << 18
_STAGING_NBYTES: Final = 16 << 20
# Page-locked memory that a GPU's bytes come through. Less waits more often for a copy to begin;
# more falls out of the core's cache before it is summed.


def checksum_of(data: Tensor) -> int:
    """The checksum of `data`: uint8 [N], contiguous, on any device."""
    if data.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(data.numpy().data)
    # A copy to ordinary memory is many times slower, most of all to memory not used before.
    staging = torch.empty(min(len(data), _STAGING_NBYTES), dtype=torch.uint8, pin_memory=True)
    digest = xxhash.xxh3_64()
    for start in range(0, len(data), _STAGING_NBYTES):
        part = data[start : start + _STAGING_NBYTES]
        arrived = staging[: len(part)].copy_(part)  # returns when the bytes are there
        digest.update(arrived.numpy().data)
    return digest.intdigest()


def copy_with_checksum(source: Tensor, destination: Tensor) -> int:
    """Copies `source` to `destination` (both uint8 [N], on the CPU); the checksum of `source`.

    Chunk by chunk, so that the source is read from memory once; by way of numpy, whose views cost
    less than half of what tensors do.
    """
    digest = xxhash.xxh3_64()
    data, target = source.numpy(), destination.numpy()
    for start in range(0, len(data), _CHUNK_NBYTES):
        chunk = data[start : start + _CHUNK_NBYTES]
        digest.update(chunk.data)
        target[start : start + _CHUNK_NBYTES] = chunk
    return digest.intdigest()
