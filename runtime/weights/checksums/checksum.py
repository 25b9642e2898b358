"""The checksum of tensor bytes, made to be computed in parallel: by GPUs and by CPUs.

The bytes are little-endian 32-bit words in rows of 1024 (4 KiB), filled up with zeros:

    checksum = nbytes + sum of word[row, column] * c(1025 + row) * c(1 + column)    mod 2**64

where c(i) is an odd number with the bits of i mixed (`coefficients.py`). The bytes decide, never
the device or the dtype.

It is not cryptographic: it finds what copies get wrong. One wrong word is always found, because
odd numbers have inverses. Words that are exchanged, moved or repeated meet other coefficients, so
they count as several wrong words, which are missed only if their sum is 0. With random coefficients
that has a chance of at most (64 - z) * 2**(z - 62), where z counts the trailing zero bits that the
words' differences share: 2**z is theirs, each odd coefficient gives one bit away, and the factors
can share the rest in 64 - z ways. The chance is 2**-56 if a difference is odd, and 2**-25 at worst,
if all words differ in their top bit only, as exchanged signs of bfloat16 may.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from umbra.runtime.weights.checksums.cpu_sums import sum_on_cpu
from umbra.runtime.weights.checksums.gpu_sums import sum_on_gpu

_MASK: Final = (1 << 64) - 1


class CastValues(NamedTuple):
    """The bytes of `values` in row-major order, whatever their strides, once cast to `dtype`."""

    values: Tensor
    dtype: torch.dtype


def checksum_of(data: Tensor) -> int:
    return checksums_of([CastValues(data, data.dtype)])[0]


def checksums_of(parts: Sequence[CastValues], num_threads: int = 1) -> list[int]:
    """The checksum of each part; waits for a GPU once. `num_threads` threads sum
    parts on the CPU."""
    by_device: dict[torch.device, list[int]] = {}
    for idx, part in enumerate(parts):
        by_device.setdefault(part.values.device, []).append(idx)
    found = [0] * len(parts)
    for indices in by_device.values():
        sums = sum_all([parts[idx] for idx in indices], num_threads)
        for idx, checksum in zip(indices, to_checksums(sums), strict=True):
            found[idx] = checksum
    return found


def to_checksums(sums: Tensor) -> list[int]:
    """The checksums that `sum_all` computes; waits for them."""
    numbers: Any = sums  # torch's `tolist` is untyped
    return [number & _MASK for number in numbers.tolist()]


@torch.no_grad()
def sum_all(parts: Sequence[CastValues], num_threads: int = 1) -> Tensor:
    """The checksums of parts on one device, there: [parts] int64, which a GPU may still compute."""
    if parts and not parts[0].values.is_cpu:
        return sum_on_gpu(parts)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checksum") as pool:
        return torch.tensor(list(pool.map(_sum_on_cpu, parts)), dtype=torch.int64)


def _sum_on_cpu(part: CastValues) -> int:
    data = part.values.to(part.dtype).contiguous()
    return sum_on_cpu(data.as_strided((data.numel(),), (1,)).view(torch.uint8))
