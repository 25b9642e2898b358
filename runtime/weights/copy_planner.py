"""Plans which part of which shard goes to which part of which parameter. Pure and torch-free.

A loader's copy reads a strided view of a tensor, which no process has to hold in one piece. The
planner splits the copy into pieces, each from one block: a box of the tensor that a rank holds.

    tensor       |-------- q: 8 rows --------|        copy: rows 4 to 8, into rows 0 to 4 of qkv
    blocks       | rank 0: 3 | rank 1: 3 | 2 |
    pieces                   r1[1:3]  r2[0:2]    ->   qkv[0:2], qkv[2:4]

Legend: d dims of the tensor, v dims of the copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Box = tuple[tuple[int, int], ...]  # [start, stop) for each of the copy's dims


@dataclass(frozen=True, slots=True)
class StridedView:
    """Elements of some memory: offset, strides and shape count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A box of a tensor that one rank holds: `starts` and `sizes` are [d]."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """A part of a copy that comes from one block: the index of its block, its first element
    there, [d], and (dim of the block, step) for each of its dims. `target` is in the memory that
    the copy writes."""

    block: int
    starts: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    target: StridedView

    def source(self, strides: Sequence[int]) -> StridedView:
        """The elements in the memory of the block, which has these strides: [d]."""
        offset = sum(n * step for n, step in zip(self.starts, strides, strict=True))
        steps = tuple(strides[dim] * step for dim, step in self.steps)
        return StridedView(offset, self.target.shape, steps)


class SplitError(Exception):
    """A copy cannot be split by blocks: it must read the tensor in one piece."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def plan_pieces(
    shape: Sequence[int], blocks: Sequence[ShardBlock], source: StridedView, target: StridedView
) -> list[CopyPiece]:
    """Splits a copy by blocks, which do not overlap: every element comes exactly once.

    Raises SplitError if the copy, from `source` in the tensor as contiguous memory to `target`,
    does not read a box, or no block has some of its elements.
    """
    if not source.numel:
        return []
    origin, axes, target = _axes_of(shape, source, target)
    pieces: list[CopyPiece] = []
    for idx, block in enumerate(blocks):
        held = _held(block, origin, axes)
        if held is not None:
            pieces.append(_piece(idx, block, origin, axes, target, held))
    num_missing = source.numel - sum(piece.target.numel for piece in pieces)
    if num_missing:
        raise SplitError(f"no block holds {num_missing} elements")
    return pieces


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dim of the copy, which walks along a dim of the tensor in steps."""

    dim: int
    step: int
    size: int


def _axes_of(
    shape: Sequence[int], source: StridedView, target: StridedView
) -> tuple[list[int], list[_Axis], StridedView]:
    """The tensor's index of the first element, the axes of the copy, and the target with the same
    dims. A dim of the copy that runs over several dims of the tensor becomes several dims."""
    strides = row_major(shape)
    origin = [source.offset // step % n if n else 0 for n, step in zip(shape, strides, strict=True)]
    todo = [
        (size, step, written)
        for size, step, written in zip(source.shape, source.strides, target.strides, strict=True)
        if size > 1
    ][::-1]
    axes: list[_Axis] = []
    written_strides: list[int] = []
    used: set[int] = set()
    while todo:
        size, step, written = todo.pop()
        dim = next((d for d, n in enumerate(shape) if n > 1 and strides[d] <= step), None)
        if dim is None or step % strides[dim]:
            raise SplitError(f"a step of {step} elements follows no dim of {tuple(shape)}")
        stride = step // strides[dim]
        fits = origin[dim] + (size - 1) * stride < shape[dim]
        if not fits:
            inner = shape[dim]
            if stride != 1 or origin[dim] or size % inner:
                raise SplitError(f"{size} steps of {step} leave a dim of {tuple(shape)}")
            todo += [(size // inner, step * inner, written * inner), (inner, step, written)][::-1]
            continue
        if dim in used:
            raise SplitError(f"two dims of a copy follow dim {dim} of {tuple(shape)}")
        used.add(dim)
        axes.append(_Axis(dim, stride, size))
        written_strides.append(written)
    sizes = tuple(axis.size for axis in axes)
    return origin, axes, StridedView(target.offset, sizes, tuple(written_strides))


def _held(block: ShardBlock, origin: Sequence[int], axes: Sequence[_Axis]) -> _Box | None:
    walked = {axis.dim for axis in axes}
    for dim, (start, size) in enumerate(zip(block.starts, block.sizes, strict=True)):
        if dim not in walked and not start <= origin[dim] < start + size:
            return None
    box: list[tuple[int, int]] = []
    for axis in axes:
        first = block.starts[axis.dim] - origin[axis.dim]
        start = max(0, -(-first // axis.step))
        stop = min(axis.size, -(-(first + block.sizes[axis.dim]) // axis.step))
        if start >= stop:
            return None
        box.append((start, stop))
    return tuple(box)


def _piece(
    idx: int,
    block: ShardBlock,
    origin: Sequence[int],
    axes: Sequence[_Axis],
    target: StridedView,
    box: _Box,
) -> CopyPiece:
    starts = [n - start for n, start in zip(origin, block.starts, strict=True)]
    offset = target.offset
    for axis, written, (start, _) in zip(axes, target.strides, box, strict=True):
        starts[axis.dim] += axis.step * start
        offset += written * start
    sizes = tuple(stop - start for start, stop in box)
    view = StridedView(offset, sizes, target.strides)
    return CopyPiece(idx, tuple(starts), tuple((axis.dim, axis.step) for axis in axes), view)
