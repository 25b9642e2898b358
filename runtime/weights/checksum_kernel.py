"""The kernel of `checksum`, in Triton, which comes with torch for GPUs.

A program sums a tile, NUM_ROWS rows of one part. A thread has the same columns of all rows, so that
a word costs one multiplication, by the coefficient of its row; columns follow at the end.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingModuleSource]
import triton.language as tl  # pyright: ignore[reportMissingModuleSource]

from umbra.runtime.weights.coefficients import (
    FIRST_COLUMN,
    FIRST_ROW,
    MULTIPLIERS,
    ROW_WORDS,
    SHIFTS,
)

_FIRST_COLUMN = tl.constexpr(FIRST_COLUMN)
_FIRST_ROW = tl.constexpr(FIRST_ROW)
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_MULTIPLIER_0 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[1])
_SHIFT_0 = tl.constexpr(SHIFTS[0])
_SHIFT_1 = tl.constexpr(SHIFTS[1])
_SHIFT_2 = tl.constexpr(SHIFTS[2])


@triton.jit
def sum_tiles(
    parts: tl.tensor,
    part_of_tile: tl.tensor,
    sums: tl.tensor,
    UNITS_PER_WORD: tl.constexpr,
    NUM_ROWS: tl.constexpr,
) -> None:
    """Adds the sum of one tile to its part's.

    Args:
        parts: [parts, 4] int64: address, number of units, first tile, and index in
            `sums`. Addresses are multiples of 16, and numbers of 4, so that a thread loads 16
            bytes at a time.
        part_of_tile: [tiles] int64
        sums: int64
        UNITS_PER_WORD: 1 for words; 2 for float32, each becoming half a word as bfloat16.
    """
    tile = tl.program_id(0)
    fields = parts + tl.load(part_of_tile + tile) * 4
    address = tl.load(fields)
    num_units = tl.multiple_of(tl.load(fields + 1), 4)
    first_tile = tl.load(fields + 2)

    row = (tile - first_tile) * NUM_ROWS + tl.arange(0, NUM_ROWS)  # [NUM_ROWS] int64
    column = tl.arange(0, _ROW_WORDS * UNITS_PER_WORD)  # [units of a row] int32
    place = row[:, None] * (_ROW_WORDS * UNITS_PER_WORD) + column[None, :]
    is_inside = place < num_units
    if UNITS_PER_WORD == 2:
        floats = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        values = tl.load(floats + place, mask=is_inside, other=0.0)
        units = values.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
        units = tl.load(words + place, mask=is_inside, other=0)

    of_rows = _coefficient(row + _FIRST_ROW)
    by_column = tl.sum(units.to(tl.uint64) * of_rows[:, None], axis=0)
    of_columns = _coefficient((column // UNITS_PER_WORD).to(tl.int64) + _FIRST_COLUMN)
    bit = (column % UNITS_PER_WORD * 16).to(tl.uint64)
    total = tl.sum(by_column * (of_columns << bit), axis=0)
    tl.atomic_add(sums + tl.load(fields + 3), total.to(tl.int64, bitcast=True))


@triton.jit
def _coefficient(number: tl.tensor) -> tl.tensor:
    mixed = number.to(tl.uint64, bitcast=True)
    mixed = (mixed ^ (mixed >> _SHIFT_0)) * _MULTIPLIER_0
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MULTIPLIER_1
    return (mixed ^ (mixed >> _SHIFT_2)) | 1
