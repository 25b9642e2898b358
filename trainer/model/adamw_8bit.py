from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from umbra.runtime.weights.shards import local_part

_BLOCK: Final = 256
"""Most elements of a block. Larger ones save little, and a large element leaves more others few
levels."""
_MIN_BLOCK: Final = 32
"""With smaller blocks, scales would take more than an eighth of what codes do."""
_DECADES: Final = 6
"""Powers of ten between a block's least and largest levels. With fewer, small gradients move their
parameters less than in AdamW; with more, levels are farther apart than 6 % (12 % of both signs)."""
_CHUNK: Final = 1 << 22
"""Elements computed at once. More take more memory meanwhile, 40 bytes each; fewer launch more
kernels."""
_AVERAGE: Final = "exp_avg_8bit"
_ROOT: Final = "exp_root_8bit"
_SCALE: Final = "_scale"


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are codes of 8 bits, with a float32 scale for each block of a row.
    Dettmers et al. 2021, arXiv:2110.02861, with three differences, for updates like AdamW's:

    - Stored is the root of the second moment, on levels without 0 (Li et al. 2023,
      arXiv:2309.01507). A moment that is rounded to 0 makes an update of 1 / eps.
    - No block goes beyond its row, so that blocks do not depend on the number of ranks.
    - A value is rounded up in as many steps as its place between two levels says, in an order that
      step and column decide. To the nearest, changes of less than half a level would be lost.

    `step` needs the state of each parameter: a "step", and `first_moments`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                state, size = self.state[parameter], block_size(parameter)
                state["step"] += 1
                codes = (parameter, parameter.grad, state[_AVERAGE], state[_ROOT])
                scales = (state[_AVERAGE + _SCALE], state[_ROOT + _SCALE])
                rows: list[Any] = [local_part(each).view(-1, size) for each in codes]
                rows += [local_part(each).view(-1, 1) for each in scales]
                for chunk in zip(*(each.split(_CHUNK // size) for each in rows), strict=True):
                    _update(chunk, state["step"], group)


def block_size(parameter: Tensor) -> int:
    """Elements of a row that share a scale. 0: its moments stay whole, as do those of vectors."""
    size = math.gcd(parameter.shape[-1], _BLOCK) if parameter.ndim >= 2 else 0
    return size if size >= _MIN_BLOCK else 0


def first_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Codes and scales before the first step, sharded as the parameter is."""
    blocks = parameter[..., : parameter.shape[-1] // block_size(parameter)]
    like: Any = torch.zeros_like
    moments: dict[str, Tensor] = {}
    for kind in (_AVERAGE, _ROOT):
        moments[kind] = like(parameter, dtype=torch.uint8)
        moments[kind + _SCALE] = like(
            blocks, dtype=torch.float32, memory_format=torch.contiguous_format
        )
    return moments


def _update(blocks: Sequence[Tensor], step: Tensor, group: Mapping[str, Any]) -> None:
    """One step of B blocks of size S: [B, S] parameter, gradient, codes; [B, 1] scales."""
    parameter, gradient, average_codes, root_codes, average_scale, root_scale = blocks
    (beta1, beta2), rate = group["betas"], group["lr"]
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    gradient, both, positive = gradient.to(dtype), *_levels(parameter.device)
    average = (both[average_codes.int()] * average_scale).to(dtype).lerp_(gradient, 1 - beta1)
    root = (positive[root_codes.int()] * root_scale).to(dtype)
    root = root.square_().lerp_(gradient.square(), 1 - beta2).sqrt_()
    denominator = (root / (1 - beta2**step).sqrt()).add_(group["eps"])
    update = (average / denominator).mul_(rate / (1 - beta1**step))
    parameter.copy_(parameter.to(dtype) * (1 - rate * group["weight_decay"]) - update)
    # Roberts' R2 sequence: any stretch of steps, or of columns, has about even shares.
    columns = torch.arange(gradient.shape[1], dtype=torch.float64, device=parameter.device)
    shares = (columns * 0.7548776662466927 + step.double() * 0.5698402909980532).frac().float()
    _store(average, average_codes, average_scale, both, shares)
    _store(root, root_codes, root_scale, positive, shares)


def _store(values: Tensor, codes: Tensor, scale: Tensor, levels: Tensor, shares: Tensor) -> None:
    """Rounds up where a value is above the lower level by more than this share of the distance."""
    scale.copy_(values.abs().amax(dim=1, keepdim=True))
    values = values.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)
    lower = torch.bucketize(values, levels, right=True, out_int32=True) - 1
    lower.clamp_(0, len(levels) - 2)
    low, high = levels[lower], levels[lower + 1]
    codes.copy_(lower + (values - low > shares * (high - low)))


@cache
def _levels(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of codes at a scale of 1: [255] of both signs and 0, and [256] above 0."""
    half = torch.logspace(-_DECADES, 0, 127, device=device)
    both = torch.cat([-half.flip(0), half.new_zeros(1), half])
    return both, torch.logspace(-_DECADES, 0, 256, device=device)
