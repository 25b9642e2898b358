"""A GPU computes the checksums that a CPU computes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from umbra.runtime.weights.checksum import (
    CastValues,
    add_by_kernel,
    add_by_torch,
    checksum_of,
    checksums_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TILE_NBYTES = 8 * 4096


@pytest.mark.parametrize(
    "nbytes", [0, 5, 16, 4096, TILE_NBYTES, TILE_NBYTES + 16, (1 << 25) + 13, 3 << 24]
)
@pytest.mark.parametrize("offset", [0, 1, 2, 16, 24])
def test_bytes_at_any_address_have_the_checksum_that_a_cpu_computes(
    nbytes: int, offset: int
) -> None:
    data = torch.randint(0, 256, (nbytes + offset,), dtype=torch.uint8)

    on_gpu = data.cuda()

    assert checksum_of(on_gpu[offset:]) == checksum_of(data[offset:])


def test_many_tensors_at_once_have_their_checksums_in_order() -> None:
    numbers = random.Random(7)
    counts = [round(2 ** numbers.uniform(0, 20)) for _ in range(500)]
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
    tensors = [torch.randn(count).to(numbers.choice(dtypes)) for count in counts]

    found = checksums_of([CastValues(tensor.cuda(), tensor.dtype) for tensor in tensors])

    assert found == [checksum_of(tensor) for tensor in tensors]


@pytest.mark.parametrize("shape", [(1,), (4,), (1000, 333), (256, 4096), (4100,), (0, 4)])
def test_values_are_cast_as_torch_casts_them(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    if values.numel() > 8:
        halfway = 1 + 2.0**-8  # between two numbers of bfloat16
        odd = [math.inf, -math.inf, -0.0, 1e-40, -3.4e38, halfway, -halfway, halfway + 2.0**-7]
        values.view(-1)[:8] = torch.tensor(odd)
    tensors = [values, values.mT if values.ndim == 2 else values[:1].view(()), values[..., ::2]]

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = checksums_of([CastValues(tensor.cuda(), dtype) for tensor in tensors])

        assert found == [checksum_of(tensor.to(dtype)) for tensor in tensors]


def test_kernel_and_torch_give_the_same() -> None:
    """So neither hides what the other gets wrong, whichever of them this GPU takes."""
    words = torch.randint(-(1 << 31), 1 << 31, (9 << 20,), dtype=torch.int64).int().cuda()
    floats = torch.randn(3 << 20, device="cuda")
    for parts in ({1: words, 2: words[1024:4096]}, {0: floats, 2: floats[1 << 20 :]}):
        by_kernel, by_torch = (torch.zeros(3, dtype=torch.int64).cuda() for _ in range(2))

        add_by_kernel(parts, by_kernel)
        add_by_torch(parts, by_torch)

        assert torch.equal(by_kernel, by_torch)
        assert by_kernel.count_nonzero() == 2
