"""The checksum of tensor bytes: XXH3, 64 bits.

Not cryptographic: it finds what copies get wrong. Measured on one core of an AMD EPYC (Zen 5):
34 GB/s, against 4.3 GB/s of zlib.crc32. The bytes decide, never the device or the dtype.
"""

from __future__ import annotations

from typing import Final

import xxhash
from torch import Tensor

# What is summed, then copied while it is still in the core's cache.
_CHUNK_NBYTES: Final = 1 << 18


def checksum_of(data: Tensor) -> int:
    """The checksum of `data`: uint8 [N], contiguous, on any device."""
    return xxhash.xxh3_64_intdigest(data.cpu().numpy().data)


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
