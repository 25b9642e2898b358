"""Packed attention on a GPU: the flash kernel beside the masks that the CPU attends with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from umbra.runtime.errors import ConfigError
from umbra.trainer.model.packed_attention import packed_attention
from umbra.trainer.model.packing import PackedInputs, Sample, pack, packing_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SIZES = {"qwen3": (128, 128), "deepseek-v3": (192, 128), "small": (20, 12), "wide values": (64, 96)}
LENGTHS = [(5, 7), (5, 19), (5, 1), (9, 300), (9, 2), (70, 33)]


def samples() -> list[Sample]:
    """Prompts of equal length are the same prompt."""
    found = [
        Sample(
            tokens=np.r_[np.full(prompt_len, prompt_len), np.arange(num_new)].astype(np.int32),
            prompt_len=prompt_len,
            generated=np.arange(prompt_len, prompt_len + num_new),
        )
        for prompt_len, num_new in LENGTHS
    ]
    return [found[idx] for idx in packing_order(found)]


def attend(heads: list[Tensor], packed: PackedInputs, *, regathers: bool) -> list[Tensor]:
    """[L, H, D_v] of queries, keys and values, and their gradients."""
    query, key, value = (x.detach().requires_grad_() for x in heads)
    output, _ = packed_attention(
        nn.Identity(), query, key, value, None, packed=packed, regathers=regathers
    )
    weights = torch.linspace(-1.0, 1.0, output.numel(), device=output.device)
    torch.autograd.backward((output.float() * weights.view_as(output)).sum())
    found = [output, query.grad, key.grad, value.grad]
    return [x.detach().float().cpu() for x in found if x is not None]


def draw_heads(num_rows: int, size: int, value_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 8, num_rows, size), (1, 2, num_rows, size), (1, 2, num_rows, value_size)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("regathers", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_the_kernel_attends_as_the_masks_do(sizes: tuple[int, int], regathers: bool) -> None:
    on_gpu = pack(samples(), torch.bfloat16, CUDA)
    on_cpu = pack(samples(), torch.float32, CPU)
    assert on_gpu.varlen is not None
    heads = [x.bfloat16() for x in draw_heads(on_cpu.token_ids.shape[1], *sizes)]

    found = attend([x.to(CUDA) for x in heads], on_gpu, regathers=regathers)

    expected = attend([x.float() for x in heads], on_cpu, regathers=False)
    assert len(found) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)


def test_heads_wider_than_the_kernel_takes_are_refused() -> None:
    packed = pack(samples(), torch.bfloat16, CUDA)
    query, key, value = (
        x.to(CUDA, torch.bfloat16) for x in draw_heads(packed.token_ids.shape[1], 512, 512)
    )

    with pytest.raises(ConfigError, match=r"at most 256 .* have 512; set model\.attention"):
        packed_attention(nn.Identity(), query, key, value, None, packed=packed)
