"""Steps whose gradients are not finite, by a planted value; imported by name in each rank."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rank_programs import (
    TRAIN,
    full_moments,
    full_parameters,
    make_policy,
    make_train_step,
    make_world,
    rank_batch,
)
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.data.train_batch import ADVANTAGES, ROLLOUT_LOGPROBS, TrainBatch
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.optimizer import local_shard
from umbra.trainer.model.token_scoring import EntropyUse
from umbra.trainer.model.train_model import TokenScores, TrainModel
from umbra.trainer.world.mesh import Mesh

SAMPLE = "e0/4/2"
MICRO_BATCHES = 3


def run_all(calls: dict[str, list[Any]]) -> dict[str, Any]:
    """Calls of programs in this module, `[name, arguments]` each, by their keys."""
    world = make_world()
    return {key: globals()[name](world, **arguments) for key, (name, arguments) in calls.items()}


def fail(world: Mesh, plant: str, where: str = SAMPLE, **options: Any) -> tuple[str, bool]:
    """The error of a step, and whether it changed a parameter. `plant` is a function below."""
    policy = make_policy(world, **options)
    batch = rank_batch(world, 0, MICRO_BATCHES)
    train_step = make_train_step(world, policy, TRAIN)
    before = full_parameters(policy)
    error = ""
    with globals()[plant](policy, batch, where):
        try:
            train_step.run(batch, 0)
        except UmbraError as raised:
            error = str(raised)
    after = full_parameters(policy)
    return error, any(not np.array_equal(before[name], after[name]) for name in before)


def skip(
    world: Mesh, batches: list[int], faulty: list[int], limit: int, **changes: Any
) -> dict[str, Any]:
    """Trains on `batches`, of which the `faulty` have a NaN. A batch's number
    is its step's, too."""
    train = replace(TRAIN, skip_nonfinite=limit, schedule="linear", **changes)
    policy = make_policy(world, train)
    warnings: list[str] = []
    train_step = make_train_step(world, policy, train, warn=warnings.append)
    metrics: list[dict[str, float]] = []
    error = ""
    for number in batches:
        batch = rank_batch(world, number, MICRO_BATCHES)
        plant = nan_logprobs if number in faulty else nothing
        with plant(policy, batch, SAMPLE):
            try:
                metrics.append(train_step.run(batch, number))
            except UmbraError as raised:
                error = str(raised)
                break
    assert policy.optimizer is not None
    states = policy.optimizer.states
    return {
        "state": full_parameters(policy) | full_moments(policy),
        "updates": [int(value) for name, value in states.items() if name.endswith(".step")],
        "metrics": metrics,
        "warnings": warnings,
        "error": error,
    }


@contextmanager
def nothing(policy: TrainModel, batch: TrainBatch, where: str) -> Generator[None]:
    yield


@contextmanager
def infinite_gradient(policy: TrainModel, batch: TrainBatch, where: str) -> Generator[None]:
    """Of one element of a parameter, in the last rank's shard."""
    step = policy.step

    def plant(idx: int) -> dict[str, float]:
        gradient = policy.parameters[where].grad
        assert gradient is not None
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            local_shard(gradient).view(-1)[-1] = torch.inf
        return step(idx)

    with patch.object(policy, "step", plant):
        yield


@contextmanager
def nan_in_backward(policy: TrainModel, batch: TrainBatch, where: str) -> Generator[None]:
    """Of the gradient of a module's output, and so of all that is before it in the model."""

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * torch.nan

    def plant(module: Any, arguments: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    module: Any = policy.model.get_submodule(where)
    with module.register_forward_hook(plant):
        yield


@contextmanager
def nan_logprobs(policy: TrainModel, batch: TrainBatch, where: str) -> Generator[None]:
    score = policy.score
    span = _span(batch, where)

    def plant(micro_batch: MicroBatch, entropy_use: EntropyUse = "none") -> TokenScores:
        scores = score(micro_batch, entropy_use)
        factors = torch.ones_like(scores.logprobs)
        is_planted = [span.start <= place < span.stop for place in micro_batch.places]
        factors[[idx for idx, planted in enumerate(is_planted) if planted]] = torch.nan
        return TokenScores(scores.logprobs * factors, scores.entropy)

    with patch.object(policy, "score", plant):
        yield


@contextmanager
def infinite_advantage(policy: TrainModel, batch: TrainBatch, where: str) -> Generator[None]:
    batch.columns[ADVANTAGES][_span(batch, where)] = np.inf
    yield


@contextmanager
def infinite_ratio(policy: TrainModel, batch: TrainBatch, where: str) -> Generator[None]:
    batch.columns[ROLLOUT_LOGPROBS][_span(batch, where)] = -1e3
    yield


def _span(batch: TrainBatch, sample_id: str) -> slice:
    """Empty on ranks without the sample."""
    if sample_id not in batch.sample_ids:
        return slice(0, 0)
    return batch.span(list(batch.sample_ids).index(sample_id))
