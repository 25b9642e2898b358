"""Copies between the image of a node and a GPU, with locked pages."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from umbra.runtime.process.host_memory import create_memory
from umbra.runtime.weights.image.gpu_copies import GpuCopies, cut_at_pieces
from umbra.runtime.weights.image.mapped_image import MappedImage
from umbra.runtime.weights.manifest import PIECE_NBYTES
from umbra.runtime.weights.shards import buffer_bytes

pytestmark = pytest.mark.gpu

NBYTES = 2 * PIECE_NBYTES + 12288
GPU = torch.device("cuda:0")


@pytest.fixture
def image() -> Generator[MappedImage]:
    fd = create_memory("image", NBYTES, is_allocated=False)
    mapped = MappedImage(fd, NBYTES)
    os.close(fd)
    yield mapped
    mapped.close()


def test_what_goes_through_locked_pages_arrives_and_is_told_of_in_order(
    image: MappedImage,
) -> None:
    masters = torch.randn(NBYTES // 2, device=GPU)
    told: list[int] = []
    copies = GpuCopies(GPU, told.append)
    bucket_nbytes = 2 << 20
    for number, start in enumerate(range(0, NBYTES, bucket_nbytes), start=1):
        window = slice(start, min(start + bucket_nbytes, NBYTES))
        image.make_present(window, for_gpu=True)
        memory = buffer_bytes(image.memory)[window].view(torch.bfloat16)
        memory.copy_(masters[start // 2 : window.stop // 2], non_blocking=True)
        copies.mark(number)
    copies.wait()
    expected = masters.bfloat16()
    assert torch.equal(buffer_bytes(image.memory).view(torch.bfloat16), expected.cpu())
    assert told == list(range(1, len(told) + 1))

    parameters = torch.empty_like(expected)
    values = buffer_bytes(image.memory).view(torch.bfloat16)
    parts = list(cut_at_pieces(values, parameters))
    for part, target in parts:
        target.copy_(part, non_blocking=True)
    torch.cuda.synchronize()
    assert len(parts) == 3
    assert torch.equal(parameters, expected)


def test_pages_are_unlocked_before_they_are_unmapped(image: MappedImage, tmp_path: Path) -> None:
    def locked_kb() -> int:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(fields["VmPin"].split()[0]) + int(fields["VmLck"].split()[0])

    torch.zeros(1, device=GPU)
    before = locked_kb()
    image.make_present(slice(0, NBYTES), for_gpu=True)
    image.make_present(slice(0, NBYTES), for_gpu=True)  # once is enough
    image.close()
    assert locked_kb() == before
    assert torch.zeros(3, device=GPU).sum().item() == 0  # no error is left behind
