"""A GPU finds and encodes what a CPU does."""

from __future__ import annotations

import pytest
import torch

from umbra.runtime.weights.links.bucket_deltas import SentShards, apply_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RUNS = [(0, 70_000), (70_512, 400_000), (400_002, 400_004)]
NBYTES = 400_010


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.24, 0.3, 1.0])
def test_a_delta_of_a_gpu_is_that_of_a_cpu(share: float) -> None:
    before = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    now = before.clone()
    words = now.view(torch.int16)
    words[torch.rand(len(words)) < share] ^= 0x101
    deltas = [_delta(before.to(device), now.to(device)) for device in ("cpu", "cuda")]

    on_cpu, on_gpu = deltas

    assert (on_cpu is None) == (on_gpu is None) == (share > 0.25)
    if on_cpu is not None and on_gpu is not None:
        assert on_gpu.is_cuda
        assert torch.equal(on_cpu, on_gpu.cpu())
        image = before.clone()
        apply_delta(image, on_gpu.cpu())
        for start, stop in RUNS:
            assert torch.equal(image[start:stop], now[start:stop])


def _delta(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor | None:
    sent = SentShards()
    sent.begin(NBYTES)
    sent.renew(0, before, RUNS)
    sent.finish("before")
    sent.begin(NBYTES)
    return sent.renew(0, now, RUNS)
