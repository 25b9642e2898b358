from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, assert_never, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.adamw_8bit import AdamW8bit, block_size, first_moments

_dist: Final[Any] = torch.distributed
_ADAMW_OPTIONS: Final = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")
EMA: Final = "ema"
"""The kind of state that is a parameter's moving average."""
Schedule = Literal["constant", "linear", "cosine"]
ParameterKind = Literal["hidden", "embedding", "vector", "other"]
_Group = tuple[type[torch.optim.Optimizer], float, float]
"""An optimizer, its parameters' share of the learning rate, and their weight decay."""


def learning_rate_factor(
    step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int, min_ratio: float
) -> float:
    """Share of the learning rate that optimizer step `step` (from 0) uses.

    It rises linearly over `warmup_steps`, the last of which has the full rate. Then "constant"
    stays, and "linear" and "cosine" fall to `min_ratio`, which the step after the last would have:
    with a ratio of 0 the last step would teach nothing. transformers does the same.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - min_ratio) * progress
        case "cosine":
            return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule)


def parameter_kinds(model: nn.Module, *, is_critic: bool) -> dict[str, ParameterKind]:
    """The kind of each parameter, by name. "hidden" are those that Muon is for: all but vectors,
    embeddings, convolutions and the head, as its authors have it. The head is an "embedding", but a
    critic's is not. Adapters are of their layer's kind."""
    head: nn.Module | None = cast("Any", model).get_output_embeddings()
    kinds: dict[int, ParameterKind] = {}
    for module in model.modules():
        if isinstance(module, nn.Conv1d) or (is_critic and module is head):
            kind = "other"
        elif isinstance(module, nn.Embedding) or module is head:
            kind = "embedding"
        else:
            continue
        kinds |= {id(parameter): kind for parameter in module.parameters()}
    return {
        # The biases of a stack of experts are [E, N]: a vector of each.
        name: "vector"
        if parameter.ndim < 2 or name.endswith("bias")
        else kinds.get(id(parameter), "hidden")
        for name, parameter in model.named_parameters()
    }


class ModelOptimizer:
    """The optimizer of a model's trained parameters: AdamW (Loshchilov and Hutter 2017,
    arXiv:1711.05101), or with `train.optimizer = "muon"` Muon for the hidden ones and AdamW for the
    others. "adamw_8bit" has moments of 8 bits for matrices. `kinds` has the kind of each by name.

    With `train.ema`, it also has the exponential moving average of the parameters, at least in
    float32. It begins with the first parameters and takes the new ones in after each step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        kinds: Mapping[str, ParameterKind],
        train: TrainSection,
    ) -> None:
        self._train = train
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        groups = defaultdict[_Group, list[nn.Parameter]](list)
        for name, parameter in self._parameters.items():
            groups[_group(parameter, kinds[name], train)].append(parameter)
        self._optimizers = [_make(*group, members, train) for group, members in groups.items()]
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
                    group["lr"] = rate * group["lr_ratio"]
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


def _group(parameter: nn.Parameter, kind: ParameterKind, train: TrainSection) -> _Group:
    if kind == "vector":
        return _AdamW, train.vector_lr_ratio, train.vector_weight_decay
    optimizer: type[torch.optim.Optimizer] = _AdamW
    if train.optimizer == "muon" and kind == "hidden":
        optimizer = Muon
    elif train.optimizer == "adamw_8bit" and block_size(parameter):
        optimizer = AdamW8bit
    if kind == "embedding":
        decay = train.embedding_weight_decay
        return optimizer, train.embedding_lr_ratio, train.weight_decay if decay is None else decay
    return optimizer, 1.0, train.weight_decay


def _make(
    kind: type[torch.optim.Optimizer],
    lr_ratio: float,
    weight_decay: float,
    parameters: Sequence[nn.Parameter],
    train: TrainSection,
) -> torch.optim.Optimizer:
    groups = [{"params": parameters, "lr_ratio": lr_ratio, "weight_decay": weight_decay}]
    options: dict[str, Any] = {"lr": train.learning_rate}
    if kind is Muon:
        return Muon(groups, options)
    options |= {"betas": train.betas, "eps": train.eps}
    if kind is AdamW8bit:
        return AdamW8bit(groups, options, compiles=train.compile is True)
    return _AdamW(groups, fused=True, **options)


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


_MUON_MOMENTUM: Final = 0.95
"""Share of the momentum that a step keeps, by Jordan and Moonshot. Lower values follow the noise of
single batches, higher ones the gradients of weights long gone."""
_MUON_RMS: Final = 0.2
"""Root mean square of an update at a learning rate of 1. Moonshot measured it for AdamW: other
values need another learning rate than AdamW's."""
_NUM_ITERATIONS: Final = 5
"""Fewer leave small singular values small; more cost time and change little."""
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # Jordan's
_MUON_EPS: Final = 1e-7


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
            scale = _MUON_RMS * max(parameter.shape[-2:]) ** 0.5
            local.add_(_shard_like(parameter, update), alpha=-lr * scale)

    def _direction(self, parameter: DTensor) -> DTensor:
        """The gradient with Nesterov's momentum."""
        gradient = cast("DTensor", parameter.grad)
        momentum = cast("Tensor", self.state[parameter]["momentum"])
        momentum.lerp_(gradient, 1 - _MUON_MOMENTUM)
        direction = gradient.lerp(momentum, _MUON_MOMENTUM).to(_computing_dtype(parameter))
        return cast("DTensor", direction)


def orthogonal(matrices: Tensor) -> Tensor:
    """[..., A, B] matrices of the same singular vectors, whose singular values are between 0.7 and
    1.2: Newton and Schulz's iteration with Jordan's polynomial."""
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    is_tall = stack.shape[-2] > stack.shape[-1]
    stack = stack.mT if is_tall else stack
    norms: Tensor = cast("Any", stack).norm(dim=(-2, -1), keepdim=True)
    stack = stack / norms.clamp(min=_MUON_EPS)
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
