"""Steps of optimizers with given gradients; imported by name in each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_programs import TRAIN, Arrays, full_moments, full_parameters, make_world, said_by
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from training_models import make_model

from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.train_model import POLICY, PassSettings, PreparedModel, TrainModel
from umbra.trainer.world.mesh import Mesh

NUM_STEPS = 3
OF_GROUPS: dict[str, Any] = {
    "embedding_lr_ratio": 2.0,
    "embedding_weight_decay": 0.3,
    "vector_lr_ratio": 0.5,
    "vector_weight_decay": 0.2,
}
MUON = replace(TRAIN, optimizer="muon", max_grad_norm=0.0, ema=0.9, **OF_GROUPS)
# Without the norm, whose sum depends on the ranks.
ADAMW_8BIT = replace(TRAIN, optimizer="adamw_8bit", eps=1e-8, max_grad_norm=0.0)


def model_with_odd_matrices(dtype: torch.dtype) -> Any:
    """With a stack of three matrices, and a matrix of fewer rows than there are ranks."""
    model = make_model().to(dtype)
    generator = torch.Generator().manual_seed(1)
    model.model.experts = nn.Parameter(torch.randn(3, 4, 6, generator=generator).to(dtype))
    model.model.row = nn.Parameter(torch.randn(1, 5, generator=generator).to(dtype))
    return model


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Whole gradients, other ones for each step."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def muon_steps(dtype_name: str, num_replicas: int) -> Arrays:
    """Parameters and moving averages after `NUM_STEPS`, whole."""
    world = make_world()
    if num_replicas > 1:
        world = Mesh.of_group(world.device, num_replicas)
    policy = make_odd_policy(world, getattr(torch, dtype_name), MUON)
    for step in range(NUM_STEPS):
        step_once(policy, step)
    states = full_moments(policy)
    averages = {name: value for name, value in states.items() if name.endswith(".ema")}
    return full_parameters(policy) | averages


def make_odd_policy(world: Mesh, dtype: torch.dtype, train: TrainSection) -> TrainModel:
    prepared = PreparedModel(model_with_odd_matrices(dtype), is_packed=False)
    return TrainModel(prepared, world.fsdp, PassSettings(compute_dtype=dtype), train)


def step_once(policy: TrainModel, step: int) -> None:
    whole = gradients(policy.model, step)
    for name, parameter in policy.parameters.items():
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = distribute_tensor(whole[name], mesh, placements)
    policy.step(step)


def resume(folder: str) -> tuple[Arrays, Arrays, list[str]]:
    """What three steps leave, without and with a resume after two, and the errors of a resume by
    AdamW and, from there, with a moving average."""
    world = make_world()
    store = CheckpointStore(Path(folder), world, keep=1)
    policy = make_odd_policy(world, torch.float32, MUON)
    for step in range(2):
        step_once(policy, step)
    state = TrainerState(step=2, version=1, world_size=world.world_size, seed=0)
    path = store.save(state, {POLICY: policy})
    resumed = make_odd_policy(world, torch.float32, MUON)
    for parameter in resumed.parameters.values():
        parameter.data.fill_(0.5)
    store.load(path, {POLICY: resumed})
    for each in (policy, resumed):
        step_once(each, 2)
    by_adamw = make_odd_policy(world, torch.float32, TRAIN)
    errors = [said_by(lambda: store.load(path, {POLICY: by_adamw}))]
    one, other = (full_parameters(each) | full_moments(each) for each in (policy, resumed))
    path = store.save(state, {POLICY: by_adamw})
    averaging = make_odd_policy(world, torch.float32, replace(TRAIN, ema=0.9))
    errors.append(said_by(lambda: store.load(path, {POLICY: averaging})))
    return one, other, errors


def adamw_8bit_steps(folder: str, first: int, last: int) -> tuple[Arrays, str]:
    """Parameters and moments, whole, after the steps `first` to `last`, the earlier of which are of
    a checkpoint there. Leaves one, and returns the error of its resume by AdamW."""
    world = make_world()
    store = CheckpointStore(Path(folder), world, keep=1)
    policy, by_adamw = (
        make_odd_policy(world, torch.float32, train) for train in (ADAMW_8BIT, TRAIN)
    )
    if first:
        store.load(store.path(first), {POLICY: policy})
    for step in range(first, last):
        step_once(policy, step)
    state = TrainerState(step=last, version=1, world_size=world.world_size, seed=0)
    path = store.save(state, {POLICY: policy}, in_background=True)
    store.finish()
    error = said_by(lambda: store.load(path, {POLICY: by_adamw}))
    return full_parameters(policy) | full_moments(policy), error
