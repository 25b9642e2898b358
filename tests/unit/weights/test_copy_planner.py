"""Copies are split by the shards that ranks hold: every element comes once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.weights.copy_planner import (
    CopyPiece,
    ShardBlock,
    SplitError,
    StridedView,
    plan_pieces,
    row_major,
)

Shape = tuple[int, ...]


def addresses(view: StridedView) -> list[int]:
    """The elements of a view, in its order."""
    return [
        view.offset + sum(n * step for n, step in zip(idx, view.strides, strict=True))
        for idx in product(*map(range, view.shape))
    ]


def whole(shape: Shape) -> StridedView:
    return StridedView(0, shape, row_major(shape))


def narrowed(view: StridedView, dim: int, start: int, size: int) -> StridedView:
    shape = (*view.shape[:dim], size, *view.shape[dim + 1 :])
    return StridedView(view.offset + start * view.strides[dim], shape, view.strides)


def chunks(shape: Shape, num_ranks: int, dim: int = 0) -> list[ShardBlock]:
    """As torch.chunk cuts: the last ranks may get less, or nothing."""
    per_rank = math.ceil(shape[dim] / num_ranks)
    bounds = [min(rank * per_rank, shape[dim]) for rank in range(num_ranks + 1)]
    return [
        ShardBlock(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(stop - start if d == dim else n for d, n in enumerate(shape)),
        )
        for start, stop in pairwise(bounds)
    ]


def moved(
    shape: Shape, blocks: Sequence[ShardBlock], pieces: Sequence[CopyPiece]
) -> Iterator[tuple[int, int]]:
    """Each element that a piece moves: its address in the tensor, and its target."""
    for piece in pieces:
        block = blocks[piece.block]
        local = row_major(block.sizes)
        for at, target in zip(addresses(piece.source(local)), addresses(piece.target), strict=True):
            place = [
                at // step % n + start
                for n, step, start in zip(block.sizes, local, block.starts, strict=True)
            ]
            assert at < math.prod(block.sizes)
            globally = sum(n * step for n, step in zip(place, row_major(shape), strict=True))
            yield globally, target


def check(
    shape: Shape, blocks: Sequence[ShardBlock], source: StridedView, target: StridedView
) -> None:
    pieces = plan_pieces(shape, blocks, source, target)

    wanted = list(zip(addresses(source), addresses(target), strict=True))
    assert Counter(moved(shape, blocks, pieces)) == Counter(wanted)


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def views(draw: st.DrawFn, shape: Shape) -> StridedView:
    """A view as loaders make them: narrowed in any dims, transposed."""
    view = whole(shape)
    for dim, n in enumerate(shape):
        start = draw(st.integers(0, n - 1))
        view = narrowed(view, dim, start, draw(st.integers(1, n - start)))
    order = draw(st.permutations(range(len(shape))))
    return StridedView(
        view.offset, tuple(view.shape[d] for d in order), tuple(view.strides[d] for d in order)
    )


@st.composite
def layouts(draw: st.DrawFn, shape: Shape) -> list[ShardBlock]:
    """Blocks that cover the tensor: FSDP2's or uneven ones on any dim."""
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        return chunks(shape, draw(st.integers(1, 5)), dim)
    bounds = sorted([0, *draw(st.lists(st.integers(0, shape[dim]), max_size=3)), shape[dim]])
    blocks = [
        ShardBlock(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(stop - start if d == dim else n for d, n in enumerate(shape)),
        )
        for start, stop in pairwise(bounds)
    ]
    return draw(st.permutations(blocks))


@given(st.data())
def test_every_element_comes_once(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    source = data.draw(views(shape))
    target = StridedView(3, source.shape, tuple(2 * step for step in row_major(source.shape)))

    check(shape, data.draw(layouts(shape)), source, target)


def test_a_stacked_parameter_is_filled_from_shards_of_its_parts() -> None:
    q, k = (8, 4), (2, 4)
    parameter = whole((5, 4))  # tensor parallel 2, second worker: four rows of q, one of k

    q_pieces = plan_pieces(
        q, chunks(q, 3), narrowed(whole(q), 0, 4, 4), narrowed(parameter, 0, 0, 4)
    )
    k_pieces = plan_pieces(
        k, chunks(k, 3), narrowed(whole(k), 0, 1, 1), narrowed(parameter, 0, 4, 1)
    )

    assert [(p.block, p.starts, p.target.shape) for p in q_pieces] == [
        (1, (1, 0), (2, 4)),
        (2, (0, 0), (2, 4)),
    ]
    assert [p.block for p in k_pieces] == [1]
    written = [at for p in (*q_pieces, *k_pieces) for at in addresses(p.target)]
    assert sorted(written) == list(range(20))


def test_an_expert_comes_from_the_rank_that_has_it() -> None:
    """Expert parallel on both sides: [experts, rows, columns] on two ranks, one expert loaded."""
    shape = (4, 3, 2)
    source = StridedView(3 * 6, (3, 2), (2, 1))  # weight[3]

    (piece,) = plan_pieces(shape, chunks(shape, 2), source, whole((3, 2)))

    assert piece.block == 1
    assert piece.starts == (1, 0, 0)


def test_dims_that_a_loader_has_merged_are_found_again() -> None:
    shape = (4, 3, 2)
    blocks = chunks(shape, 3)

    check(shape, blocks, StridedView(0, (12, 2), (2, 1)), whole((12, 2)))
    check(shape, blocks, StridedView(0, (24,), (1,)), whole((24,)))
    check(shape, blocks, StridedView(0, (2, 12), (1, 2)), whole((2, 12)))  # and transposed


def test_a_scalar_has_one_holder() -> None:
    pieces = plan_pieces((), [ShardBlock((), ())], whole(()), whole(()))

    assert [(p.block, p.target.shape) for p in pieces] == [(0, ())]


def test_nothing_is_copied_for_an_empty_part() -> None:
    assert plan_pieces((0, 3), [], whole((0, 3)), whole((0, 3))) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (StridedView(1, (7,), (1,)), "7 steps of 1 leave a dim"),
        (StridedView(0, (2, 2), (8, 4)), "two dims of a copy follow dim 0"),
        (StridedView(0, (3,), (0,)), "a step of 0 elements follows no dim"),
        (StridedView(0, (3,), (5,)), "a step of 5 elements follows no dim"),
    ],
)
def test_a_copy_that_reads_no_box_is_not_split(source: StridedView, text: str) -> None:
    with pytest.raises(SplitError, match=text):
        plan_pieces((4, 4), chunks((4, 4), 2), source, whole(source.shape))


def test_elements_that_no_rank_holds_are_noticed() -> None:
    with pytest.raises(SplitError, match="no block holds 6 elements"):
        plan_pieces((4, 3), chunks((4, 3), 2)[:1], whole((4, 3)), whole((4, 3)))
