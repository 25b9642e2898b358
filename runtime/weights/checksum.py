"""The checksum of tensor bytes: XXH3, 64 bits.

Not cryptographic: it finds what copies get wrong. Measured on one core of an AMD EPYC (Zen 5):
34 GB/s, against 4.3 GB/s of zlib.crc32. The bytes decide, never the device or the dtype.
"""

from __future__ import annotations

from typing import Final

import torch
import xxhash
from torch import Tensor

# Bytes that are summed, then copied while they are still in the core's cache.
_CHUNK_NBYTES: Final = 1 << 18
_STAGING_NBYTES: Final = 16 << 20
# Page-locked memory through which a GPU's bytes are copied. Less waits more often for a copy to
# begin; more leaves the core's cache before it is summed.


def checksum_of(data: Tensor) -> int:
    """The checksum of `data`: uint8 [N], contiguous, on any device."""
    if data.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(data.numpy().data)
    # A copy to pageable memory is many times slower, most of all to memory that was not used
    # before.
    staging = torch.empty(min(len(data), _STAGING_NBYTES), dtype=torch.uint8, pin_memory=True)
    digest = xxhash.xxh3_64()
    for start in range(0, len(data), _STAGING_NBYTES):
        part = data[start : start + _STAGING_NBYTES]
        arrived = staging[: len(part)].copy_(part)  # returns when the bytes are there
        digest.update(arrived.numpy().data)
    return digest.intdigest()


def copy_with_checksum(source: Tensor, destination: Tensor) -> int:
    """Copies `source` to `destination` (both uint8 [N], on the CPU); returns the checksum of
    `source`.

    It works in chunks, so that the source is read from memory once, and uses numpy, whose views
    cost less than half of tensor views.
    """
    digest = xxhash.xxh3_64()
    data, target = source.numpy(), destination.numpy()
    for start in range(0, len(data), _CHUNK_NBYTES):
        chunk = data[start : start + _CHUNK_NBYTES]
        digest.update(chunk.data)
        target[start : start + _CHUNK_NBYTES] = chunk
    return digest.intdigest()
