from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_MOMENTUM: Final = 0.95
"""Share of the momentum that a step keeps, by Jordan and Moonshot. Lower values follow the noise of
single batches, higher ones the gradients of weights long gone."""
_RMS: Final = 0.2
"""Root mean square of an update at a learning rate of 1. Moonshot measured it for AdamW: other
values need another learning rate than AdamW's."""
_NUM_ITERATIONS: Final = 5
"""Fewer leave small singular values small; more cost time and change little."""
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # Jordan's
_EPS: Final = 1e-7

_dist: Final[Any] = torch.distributed


class Muon(torch.optim.Optimizer):
    """Momentum with its singular values set to about 1. Jordan 2024,
    kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982.

    Computes what `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` does, for sharded parameters.
    torch's own works on the shards, which takes 15 all-gathers for a matrix, and fails where a rank
    has no row. Here each matrix is gathered once. The ranks take turns: each computes the update of
    every n-th matrix and broadcasts it. A parameter with three axes is a stack of matrices.
    `step` is collective over all ranks, and needs the state "momentum" of each parameter.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        num_ranks = _dist.get_world_size()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for first in range(0, len(parameters), num_ranks):
                self._update(
                    parameters[first : first + num_ranks], group["lr"], group["weight_decay"]
                )

    def _update(self, parameters: Sequence[DTensor], lr: float, weight_decay: float) -> None:
        """Updates at most one parameter for each rank. All are gathered before a rank computes,
        because the others would wait for it."""
        rank, mine = _dist.get_rank(), torch.empty(0)
        for owner, parameter in enumerate(parameters):
            whole = self._direction(parameter).full_tensor()
            if owner == rank:
                mine = whole
        if rank < len(parameters):
            mine = orthogonal(mine)
        for owner, parameter in enumerate(parameters):
            update = mine
            if owner != rank:
                dtype = _computing_dtype(parameter)
                update = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            _dist.broadcast(update, src=owner)
            local = parameter.to_local()
            local.mul_(1 - lr * weight_decay)
            scale = _RMS * max(parameter.shape[-2:]) ** 0.5
            local.add_(_shard_like(parameter, update), alpha=-lr * scale)

    def _direction(self, parameter: DTensor) -> DTensor:
        """The gradient with Nesterov's momentum."""
        gradient = cast("DTensor", parameter.grad)
        momentum = cast("Tensor", self.state[parameter]["momentum"])
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        direction = gradient.lerp(momentum, _MOMENTUM).to(_computing_dtype(parameter))
        return cast("DTensor", direction)


def orthogonal(matrices: Tensor) -> Tensor:
    """[..., A, B] matrices of the same singular vectors, whose singular values are between 0.7 and
    1.2: Newton and Schulz's iteration with Jordan's polynomial."""
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    is_tall = stack.shape[-2] > stack.shape[-1]
    stack = stack.mT if is_tall else stack
    norms: Tensor = cast("Any", stack).norm(dim=(-2, -1), keepdim=True)
    stack = stack / norms.clamp(min=_EPS)
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = stack @ stack.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        stack = torch.baddbmm(stack, polynomial, stack, beta=linear)  # rounds once
    return (stack.mT if is_tall else stack).reshape(matrices.shape).contiguous()


def _computing_dtype(parameter: Tensor) -> torch.dtype:
    """Rounding to bfloat16 changes singular values less than the iteration leaves them apart."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.bfloat16


def _shard_like(parameter: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks have. Not collective."""
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements).to_local()
