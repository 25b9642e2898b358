"""How copies from an image to a GPU are cut, as far as a CPU can show it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.weights.image.gpu_copies import GpuCopies, common_device, cut_at_pieces

PIECE_NBYTES = 64


@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=3),
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
)
def test_no_part_of_a_copy_crosses_the_edge_of_a_piece(
    shape: list[int], offset: int, is_strided: bool, dtype: torch.dtype
) -> None:
    size = torch.Size(shape)
    image = torch.arange(offset + size.numel()).to(dtype)
    values = image[offset:].view(size)
    target = torch.zeros([*shape, 2], dtype=dtype)[..., 0] if is_strided else values.new_zeros(size)

    parts = list(cut_at_pieces(values, target, PIECE_NBYTES))

    for part, there in parts:
        start = part.storage_offset() * dtype.itemsize
        assert part.is_contiguous()
        assert start // PIECE_NBYTES == (start + part.nbytes - 1) // PIECE_NBYTES
        there.copy_(part)
    assert torch.equal(target, values)
    assert sum(part.numel() for part, _ in parts) == values.numel()
    most_edges = values.nbytes // PIECE_NBYTES + 1
    assert len(parts) <= 1 + 2 * max(1, len(shape)) * most_edges


def test_transposed_views_are_cut_because_torch_copies_between_them_in_place() -> None:
    values, target = torch.arange(600).view(20, 30), torch.zeros(20, 30, dtype=torch.int64)

    parts = list(cut_at_pieces(values.T, target.T, PIECE_NBYTES))

    for part, there in parts:
        start = part.storage_offset() * 8
        assert start // PIECE_NBYTES == (start + part.nbytes - 1) // PIECE_NBYTES
        there.copy_(part)
    assert torch.equal(target, values)


def test_a_view_with_gaps_stays_whole() -> None:
    values = torch.arange(400).view(20, 20)[:, 3:7]

    assert len(list(cut_at_pieces(values, torch.zeros(20, 4), PIECE_NBYTES))) == 1


def test_on_a_cpu_copies_are_done_when_they_return() -> None:
    told: list[int] = []
    copies = GpuCopies(common_device([torch.zeros(3)]), told.append)

    copies.mark(1)
    assert told == [1]
    copies.mark(3)
    copies.wait()

    assert told == [1, 3]
    assert not copies.is_on_gpu
    assert common_device([]) == torch.device("cpu")
