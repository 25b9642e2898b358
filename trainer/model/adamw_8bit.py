from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from umbra.runtime.weights.shards import local_part
from umbra.trainer.model.compiling import compile_with_constants

_BLOCK: Final = 256
"""Most elements of a block. Larger ones save little, and a large element leaves more others few
levels."""
_MIN_BLOCK: Final = 32
"""With smaller blocks, scales would take more than an eighth of what codes do."""
_DECADES: Final = 6
"""Powers of ten between a block's least and largest levels. With fewer, small gradients move their
parameters less than in AdamW; with more, levels are farther apart than 6 % (12 % of both signs)."""
_CHUNK: Final = 1 << 14
"""Blocks computed at once where nothing is compiled. More take more memory meanwhile, 40 bytes for
each element; fewer launch more kernels."""
_COMPILED_CHUNK: Final = 1 << 16
"""With fewer, kernels end before the next are launched."""
_OCTAVES: Final = _DECADES * math.log2(10)
_LAST: Final = 255
_LAST_SIGNED: Final = 126
"""Index of the largest level of codes without and with a sign."""
_MOMENTS: Final = ("exp_avg_8bit", "exp_root_8bit")
_SCALE: Final = "_scale"


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are codes of 8 bits, with a float32 scale for each block of a row.
    Dettmers et al. 2021, arXiv:2110.02861, with three differences, for updates like AdamW's:

    - Stored is the root of the second moment, on levels without 0 (Li et al. 2023,
      arXiv:2309.01507). A moment that is rounded to 0 makes an update of 1 / eps.
    - No block goes beyond its row, so that blocks do not depend on the number of ranks.
    - A value is rounded up in as many steps as its place between two levels says, in an order that
      step and column decide. To the nearest, changes of less than half a level would be lost.

    `step` needs the state of each parameter: a "step", and `first_moments`. Where it `compiles`, it
    makes one pass over memory, and may round last bits in another way.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], options: dict[str, Any], *, compiles: bool
    ) -> None:
        super().__init__(groups, options)
        self._update = compile_with_constants(_update) if compiles else _update
        self._num_blocks = _COMPILED_CHUNK if compiles else _CHUNK
        self._chunks: dict[Tensor, list[Sequence[Tensor]]] = {}  # views that take long to make

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            device, decay = group["params"][0].device, group["lr"] * group["weight_decay"]
            rate, kept = (torch.full((), x, device=device) for x in (group["lr"], 1 - decay))
            constants = (group["betas"], group["eps"])
            for parameter in [p for p in group["params"] if p.grad is not None]:
                state, size = self.state[parameter], block_size(parameter)
                state["step"] += 1
                if parameter not in self._chunks:
                    codes = [self._split(state[moment], size) for moment in _MOMENTS]
                    scales = [self._split(state[moment + _SCALE], 1) for moment in _MOMENTS]
                    whole = (self._split(parameter, size), *codes, *scales)
                    self._chunks[parameter] = list(zip(*whole, strict=True))
                gradients = self._split(parameter.grad, size)
                for gradient, chunk in zip(gradients, self._chunks[parameter], strict=True):
                    self._update(gradient, chunk, state["step"], rate, kept, *constants)

    def _split(self, tensor: Tensor, size: int) -> Sequence[Tensor]:
        """[B, size] each."""
        rows, untyped = cast("Any", local_part(tensor)).view(-1, size), cast("Any", torch)
        chunks: Sequence[Tensor] = rows.split(self._num_blocks)
        for chunk in chunks:
            untyped._dynamo.mark_static(chunk, 1)  # a block's size is known, so it is read once
        return chunks


def block_size(parameter: Tensor) -> int:
    """Elements of a row that share a scale. 0: its moments stay whole, as do those of vectors."""
    size = math.gcd(parameter.shape[-1], _BLOCK) if parameter.ndim >= 2 else 0
    return size if size >= _MIN_BLOCK else 0


def first_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Codes and scales before the first step, sharded as the parameter is."""
    blocks = parameter[..., : parameter.shape[-1] // block_size(parameter)]
    like: Any = torch.zeros_like
    moments: dict[str, Tensor] = {}
    for kind in _MOMENTS:
        moments[kind] = like(parameter, dtype=torch.uint8)
        moments[kind + _SCALE] = like(
            blocks, dtype=torch.float32, memory_format=torch.contiguous_format
        )
    return moments


def _update(
    gradient: Tensor,
    blocks: Sequence[Tensor],
    step: Tensor,
    rate: Tensor,
    kept: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of B blocks of size S: [B, S] gradient, parameter, codes; [B, 1] scales; the share
    of parameters that their decay has `kept`."""
    parameter, average_codes, root_codes, average_scale, root_scale = blocks
    (beta1, beta2), dtype = betas, torch.promote_types(parameter.dtype, torch.float32)
    gradient, signed = gradient.to(dtype), average_codes.float() - _LAST_SIGNED - 1
    average = signed.sign() * _level(signed.abs() - 1, _LAST_SIGNED) * average_scale
    average = average.to(dtype).lerp_(gradient, 1 - beta1)
    root = (_level(root_codes.float(), _LAST) * root_scale).to(dtype)
    root = root.square_().lerp_(gradient.square(), 1 - beta2).sqrt_()
    denominator = (root / (1 - beta2**step).sqrt()).add_(eps)
    update = (average / denominator).mul_(rate / (1 - beta1**step))
    parameter.copy_(parameter.to(dtype) * kept - update)
    # Roberts' R2 sequence: any stretch of steps, or of columns, has about even shares.
    columns = torch.arange(gradient.shape[1], dtype=torch.float64, device=parameter.device)
    shares = (columns * 0.7548776662466927 + step.double() * 0.5698402909980532).frac().float()
    average, root = _scale(average, average_scale), _scale(root, root_scale)
    signed = average.sign() * (_round(average.abs(), -1, _LAST_SIGNED, shares) + 1)
    average_codes.copy_(signed + _LAST_SIGNED + 1)
    root_codes.copy_(_round(root, 0, _LAST, shares))


def _scale(values: Tensor, scale: Tensor) -> Tensor:
    scale.copy_(values.abs().amax(dim=1, keepdim=True))
    return values.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)


def _level(indices: Tensor, last: int) -> Tensor:
    """Evenly spaced powers from 10**-_DECADES at 0 to 1 at `last`; below 0, the level 0."""
    return torch.exp2((indices / last - 1) * _OCTAVES) * (indices >= 0)


def _round(values: Tensor, first: int, last: int, shares: Tensor) -> Tensor:
    """Indices of levels. Rounds up where a value is above the lower level by more than this share
    of the distance."""
    lower = ((values.log2() / _OCTAVES + 1) * last).floor_().clamp_(first, last - 1)
    low, high = _level(lower, last), _level(lower + 1, last)
    return lower + (values - low > shares * (high - low))
