from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, assert_never, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.adamw_8bit import AdamW8bit, block_size, first_moments
from umbra.trainer.model.muon import Muon

_dist: Final[Any] = torch.distributed
_ADAMW_OPTIONS: Final = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")
EMA: Final = "ema"
"""The kind of state that is a parameter's moving average."""
Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int, min_ratio: float
) -> float:
    """Share of the learning rate that optimizer step `step` (from 0) uses.

    It rises linearly over `warmup_steps`, the last of which has the full rate. Then "constant"
    stays, and "linear" and "cosine" fall to `min_ratio` at the last step.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    last = max(total_steps - 1, 1)
    falling = max(last - warmup_steps, 1)
    progress = min(max(step - warmup_steps, 0) / falling, 1.0)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - min_ratio) * progress
        case "cosine":
            return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule)


class ModelOptimizer:
    """The optimizer of a model's trained parameters: AdamW (Loshchilov and Hutter 2017,
    arXiv:1711.05101), or with `train.optimizer = "muon"` Muon for those in `hidden`, the names of
    the hidden layers' matrices, and AdamW for the others. "adamw_8bit" has moments of 8 bits for
    matrices. Vectors (norms, biases) do not decay.

    With `train.ema`, it also has the exponential moving average of the parameters, at least in
    float32. It begins with the first parameters and takes the new ones in after each step.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], hidden: Collection[str], train: TrainSection
    ) -> None:
        self._train = train
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        by_kind = defaultdict[type[torch.optim.Optimizer], list[nn.Parameter]](list)
        for name, parameter in self._parameters.items():
            by_kind[_kind(train, parameter, is_hidden=name in hidden)].append(parameter)
        self._optimizers = [_make(kind, group, train) for kind, group in by_kind.items()]
        self._averages = {
            name: p.data.to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._parameters.items()
            if train.ema
        }

    @torch.no_grad()
    def step(self, step: int) -> dict[str, float]:
        """Clips, applies and clears the gradients of optimizer step `step` (from 0). Collective.
        Returns `grad_norm` before clipping and `learning_rate`. If the norm is not finite,
        parameters and gradients are unchanged, and the caller must act on it."""
        train = self._train
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = global_norm(gradients)
        rate = train.learning_rate * learning_rate_factor(
            step,
            schedule=train.schedule,
            warmup_steps=train.num_warmup_steps,
            total_steps=train.total_steps,
            min_ratio=train.min_lr_ratio,
        )
        if math.isfinite(norm):
            limit = train.max_grad_norm
            if limit and norm > limit:
                untyped: Any = torch
                untyped._foreach_mul_([local_shard(each) for each in gradients], limit / norm)
            self.start()
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                cast("Any", optimizer).step()
            self._average()
            self.clear_gradients()
        return {"grad_norm": norm, "learning_rate": rate}

    def _average(self) -> None:
        for name, average in self._averages.items():
            parameter = local_shard(self._parameters[name]).to(average.dtype)
            local_shard(average).lerp_(parameter, 1 - self._train.ema)

    def clear_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def start(self) -> None:
        """Creates the state of the first step, also for parameters that get no gradient."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in cast("list[nn.Parameter]", group["params"]):
                    state = cast("dict[str, Tensor]", optimizer.state[parameter])
                    if not state:
                        state |= _first_state(optimizer, parameter.data)

    @property
    def states(self) -> dict[str, Tensor]:
        """The live state by parameter and kind, such as NAME.exp_avg. Before `start`, it has the
        moving average alone."""
        averages = {f"{name}.{EMA}": average for name, average in self._averages.items()}
        return averages | {
            f"{name}.{kind}": value
            for name, parameter in self._parameters.items()
            for optimizer in self._optimizers
            for kind, value in cast("dict[str, Tensor]", optimizer.state.get(parameter, {})).items()
        }


class _AdamW(torch.optim.AdamW):
    """Computes what torch's does, from the shards: with hundreds of DTensors, their dispatch takes
    longer than the kernel. `step` needs the state of each parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            untyped: Any = adamw
            untyped(
                [local_shard(p) for p in parameters],
                [local_shard(p.grad) for p in parameters],
                [local_shard(state["exp_avg"]) for state in states],
                [local_shard(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{name: group[name] for name in _ADAMW_OPTIONS},
            )


def _kind(
    train: TrainSection, parameter: nn.Parameter, *, is_hidden: bool
) -> type[torch.optim.Optimizer]:
    if train.optimizer == "muon" and is_hidden:
        return Muon
    return AdamW8bit if train.optimizer == "adamw_8bit" and block_size(parameter) else _AdamW


def _make(
    kind: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], train: TrainSection
) -> torch.optim.Optimizer:
    if kind is Muon:
        return Muon(parameters, train.learning_rate, train.weight_decay)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": train.learning_rate, "betas": train.betas, "eps": train.eps}
    return (
        AdamW8bit(groups, options) if kind is AdamW8bit else _AdamW(groups, fused=True, **options)
    )


def _first_state(optimizer: torch.optim.Optimizer, data: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, Muon):
        return {"momentum": torch.zeros_like(data)}
    state = {"step": torch.zeros((), dtype=torch.float32, device=data.device)}
    if isinstance(optimizer, AdamW8bit):
        return state | first_moments(data)
    return state | {"exp_avg": torch.zeros_like(data), "exp_avg_sq": torch.zeros_like(data)}


def global_norm(gradients: Sequence[Tensor]) -> float:
    """L2 norm of all gradients, from each rank's shards. Collective. A gradient's square is summed
    over the axes that it is sharded on: ranks on others have the same."""
    known: dict[object, tuple[ProcessGroup, ...]] = {}  # by the layout, which many share
    shards = defaultdict[tuple[ProcessGroup, ...], list[Tensor]](list)
    for gradient in gradients:
        layout = (
            (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
        )
        if layout not in known:
            known[layout] = _sharding_groups(gradient)
        shards[known[layout]].append(local_shard(gradient))
    square = 0.0
    for groups, local_gradients in shards.items():
        total = get_total_norm(local_gradients, foreach=True).double().square()
        for group in groups:
            _dist.all_reduce(total, group=group)
        square += float(total)
    return math.sqrt(square)


def _sharding_groups(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    axes = [axis for axis, where in enumerate(tensor.placements) if isinstance(where, Shard)]
    return tuple(tensor.device_mesh.get_group(axis) for axis in axes)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
