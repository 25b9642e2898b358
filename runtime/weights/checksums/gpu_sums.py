"""Checksums on a GPU: one launch of a kernel for all tensors, and one for tensors that it casts.

It reads tensors in place, and casts float32 to bfloat16 on the way. Strided tensors, tensors not
aligned to 16 bytes, and other casts are copied first.

    parts   |     0     |  1  |   2   |     addresses and lengths, in a table that the kernel reads
    tiles   | 0 | 1 | 2 |  3  | 4 | 5 |     a program each, which adds to the sum of its part

Where Triton cannot compile the kernel, for example without a C compiler, torch computes the same
with many passes over memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from umbra.runtime.weights.checksums.coefficients import (
    FIRST_COLUMN,
    FIRST_ROW,
    ROW_WORDS,
    coefficients,
)

logger = logging.getLogger(__name__)

_LOAD_NBYTES: Final = 16  # what a thread loads at a time
_TILE_ROWS: Final = 8
# Rows of 4 KiB in memory, thus half as many of a cast. More need more registers; fewer spend more
# time on the start and end of programs.
_NUM_WARPS: Final = 4
_MAX_COPIED_NBYTES: Final = 256 << 20
# Copies of strided, misaligned or otherwise cast tensors. Less means more launches.
_CHUNK_ROWS: Final = 4096
# Rows that torch sums at a time: 16 MiB take eight times as much memory.


def sum_on_gpu(parts: Sequence[tuple[Tensor, torch.dtype]]) -> Tensor:
    """The checksums of parts, bytes cast to a dtype: [parts] int64, which their GPU may
    still compute."""
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
    from umbra.runtime.weights.checksums.checksum_kernel import sum_tiles

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
        chunk_units = _CHUNK_ROWS * ROW_WORDS * _units_per_word(units)
        for start in range(0, len(units), chunk_units):
            words = units[start : start + chunk_units]
            if words.dtype == torch.float32:
                words = words.bfloat16().view(torch.int32)
            rows = functional.pad(words, (0, -len(words) % ROW_WORDS)).view(-1, ROW_WORDS)
            first_row = start // chunk_units * _CHUNK_ROWS
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
