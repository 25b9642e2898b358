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

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from umbra.runtime.weights.coefficients import FIRST_COLUMN, FIRST_ROW, ROW_WORDS, coefficients

logger = logging.getLogger(__name__)

_MASK: Final = (1 << 64) - 1

_ROW_NBYTES: Final = 4 * ROW_WORDS
_CHUNK_ROWS: Final = 128
_CHUNK_NBYTES: Final = _CHUNK_ROWS * _ROW_NBYTES
# A chunk and its shifted copy stay in a core's cache. Smaller chunks call numpy more often.
_NUM_KEPT: Final = 4096
# Coefficients of rows, cached by chunk: enough for 4 GiB, in 8 MiB.

_Words = NDArray[np.uint64]

_LOAD_NBYTES: Final = 16  # what a thread loads at a time
_TILE_ROWS: Final = 8
# Rows of 4 KiB in memory, thus half as many of a cast. More need more registers; fewer spend more
# time on the start and end of programs.
_NUM_WARPS: Final = 4
_MAX_COPIED_NBYTES: Final = 256 << 20
# Copies of strided, misaligned or otherwise cast tensors. Less means more launches.
_GPU_CHUNK_ROWS: Final = 4096
# Rows that torch sums at a time: 16 MiB take eight times as much memory.


class CastValues(NamedTuple):
    """The bytes of `values` in row-major order, whatever their strides, once cast to `dtype`."""

    values: Tensor
    dtype: torch.dtype


def checksum_of(data: Tensor) -> int:
    return checksums_of([CastValues(data, data.dtype)])[0]


def checksums_of(parts: Sequence[CastValues], num_threads: int = 1) -> list[int]:
    """The checksum of each part; waits for a GPU once. `num_threads` threads sum parts that are on
    the CPU."""
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


def sum_on_cpu(data: Tensor) -> int:
    """The checksum of `data`, uint8 [N], contiguous, as signed 64 bits. Releases the GIL.

    Two words are one number of 64 bits, pair = high * 2**32 + low. With their coefficients a and b,

        low * a + high * b = pair * a + high * (b - 2**32 * a)    mod 2**64

    so that a pair takes two multiplications and a shift. Measured on one core of an AMD EPYC (Zen
    5) with 512 MiB: 10 GB/s, against 18 to 28 GB/s of XXH3, whose steps depend on each other.
    """
    array: NDArray[np.uint8] = data.numpy()
    total = len(array)
    for start in range(0, len(array), _CHUNK_NBYTES):
        total += _sum_of_chunk(array[start : start + _CHUNK_NBYTES], start // _CHUNK_NBYTES)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _sum_of_chunk(data: NDArray[np.uint8], chunk: int) -> int:
    num_rows = -(-len(data) // _ROW_NBYTES)
    if len(data) % _ROW_NBYTES:
        filled = np.zeros(num_rows * _ROW_NBYTES, np.uint8)
        filled[: len(data)] = data
        data = filled
    pairs = data.view(np.uint64).reshape(num_rows, ROW_WORDS // 2)
    of_pairs, of_highs = _column_coefficients()
    einsum: Any = np.einsum  # twice as fast as np.dot of integers
    by_row: _Words = einsum("ij,j->i", pairs, of_pairs)
    by_row += einsum("ij,j->i", pairs >> np.uint64(32), of_highs)
    return int(np.dot(by_row, _row_coefficients(chunk)[:num_rows]))


@lru_cache(_NUM_KEPT)
def _row_coefficients(chunk: int) -> _Words:
    return _numbers(FIRST_ROW + chunk * _CHUNK_ROWS, _CHUNK_ROWS)


@cache
def _column_coefficients() -> tuple[_Words, _Words]:
    of_words = _numbers(FIRST_COLUMN, ROW_WORDS)
    of_lows, of_highs = of_words[::2].copy(), of_words[1::2].copy()
    return of_lows, of_highs - (of_lows << np.uint64(32))


def _numbers(first: int, count: int) -> _Words:
    return coefficients(first, count, torch.device("cpu")).numpy().view(np.uint64)


def sum_on_gpu(parts: Sequence[tuple[Tensor, torch.dtype]]) -> Tensor:
    """The checksums of parts, cast to their dtypes: [parts] int64, which a GPU may still compute.

    It reads tensors in place, and casts float32 to bfloat16 on the way. Strided tensors, tensors
    not aligned to 16 bytes, and other casts are copied first.

     parts   |     0     |  1  |   2   |     addresses and lengths, in a table that the kernel reads
     tiles   | 0 | 1 | 2 |  3  | 4 | 5 |     a program each, which adds to the sum of its part

    Where Triton cannot compile the kernel, for example without a C compiler, torch computes the
    same with many passes over memory.
    """
    device = parts[0][0].device
    with torch.cuda.device(device):
        add_sums = add_by_kernel if _can_run_kernel(device) else add_by_torch
        sums = numbers_on(device, [v.numel() * dtype.itemsize for v, dtype in parts])
        words: dict[int, Tensor] = {}
        floats: dict[int, Tensor] = {}
        copied_nbytes = 0
        for idx, (values, dtype) in enumerate(parts):
            if not values.numel():
                continue
            if _can_cast(values, dtype):
                floats[idx] = values.view(-1)
            else:
                words[idx] = _as_words(values.to(dtype))
                if words[idx].data_ptr() != values.data_ptr():
                    copied_nbytes += words[idx].nbytes
            if copied_nbytes > _MAX_COPIED_NBYTES:
                add_sums(words, sums)
                words, copied_nbytes = {}, 0
        for units in (words, floats):
            if units:
                add_sums(units, sums)
        return sums


def numbers_on(device: torch.device, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """An int64 tensor of these numbers, made without waiting for the GPU's current work."""
    is_on_gpu = device.type != "cpu"
    at_host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=is_on_gpu)
    return at_host.to(device, non_blocking=True)


def add_by_kernel(parts: Mapping[int, Tensor], sums: Tensor) -> None:
    """Adds the sum of each part, by index, to its element of `sums`, [parts] int64 on the same GPU.
    Parts are all int32 words, or all float32 to be cast to bfloat16: [N] each, contiguous, with
    addresses and lengths in multiples of 16 bytes."""
    from umbra.runtime.weights.checksum_kernel import sum_tiles

    kernel: Any = sum_tiles
    units_per_word = _units_per_word(next(iter(parts.values())))
    tile_units = _TILE_ROWS * ROW_WORDS
    table: list[tuple[int, int, int, int]] = []
    num_tiles: list[int] = []
    first_tile = 0
    for idx, units in parts.items():
        table.append((units.data_ptr(), units.numel(), first_tile, idx))
        num_tiles.append(-(-units.numel() // tile_units))
        first_tile += num_tiles[-1]
    part_of_tile = torch.arange(len(table), device=sums.device).repeat_interleave(
        numbers_on(sums.device, num_tiles), output_size=first_tile
    )
    on_gpu = numbers_on(sums.device, table)
    kernel[(first_tile,)](
        *(on_gpu, part_of_tile, sums),
        UNITS_PER_WORD=units_per_word,
        NUM_ROWS=_TILE_ROWS // units_per_word,
        num_warps=_NUM_WARPS,
    )


def add_by_torch(parts: Mapping[int, Tensor], sums: Tensor) -> None:
    """`add_by_kernel` on any device."""
    of_columns = coefficients(FIRST_COLUMN, ROW_WORDS, sums.device)
    for idx, units in parts.items():
        chunk_units = _GPU_CHUNK_ROWS * ROW_WORDS * _units_per_word(units)
        for start in range(0, len(units), chunk_units):
            words = units[start : start + chunk_units]
            if words.dtype == torch.float32:
                words = words.bfloat16().view(torch.int32)
            rows = functional.pad(words, (0, -len(words) % ROW_WORDS)).view(-1, ROW_WORDS)
            first_row = start // chunk_units * _GPU_CHUNK_ROWS
            of_rows = coefficients(FIRST_ROW + first_row, len(rows), sums.device)
            by_row = ((rows.long() & 0xFFFFFFFF) * of_columns).sum(1)
            sums[idx] += (by_row * of_rows).sum()


def _units_per_word(units: Tensor) -> int:
    return 2 if units.dtype == torch.float32 else 1


@cache
def _can_run_kernel(device: torch.device) -> bool:
    words = torch.zeros(4, dtype=torch.int32, device=device)
    try:
        add_by_kernel({0: words}, torch.zeros(1, dtype=torch.int64, device=device))
    except Exception as error:  # Triton's errors have no common class  # noqa: BLE001
        logger.warning(
            "Triton cannot compile the kernel for checksums on %s, so they take about ten times as "
            "long: %s. Install a C compiler where this process runs.",
            device,
            error,
        )
        return False
    return True


def _can_cast(values: Tensor, dtype: torch.dtype) -> bool:
    return (
        values.dtype == torch.float32
        and dtype == torch.bfloat16
        and values.is_contiguous()
        and _is_aligned(values)
    )


def _as_words(values: Tensor) -> Tensor:
    """The values' bytes, filled up with zeros: [N] int32."""
    flat = values.contiguous().as_strided((values.numel(),), (1,)).view(torch.uint8)
    if not _is_aligned(flat):
        flat = functional.pad(flat, (0, -len(flat) % _LOAD_NBYTES))
    return flat.view(torch.int32)


def _is_aligned(values: Tensor) -> bool:
    return values.data_ptr() % _LOAD_NBYTES == 0 and values.nbytes % _LOAD_NBYTES == 0
