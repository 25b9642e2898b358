"""Muon and the moving average on shards are those of whole models: real ranks, gloo, FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import start_fork
from optimizer_programs import (
    MUON,
    NUM_STEPS,
    gradients,
    model_with_odd_matrices,
    muon_steps,
    resume,
)
from rank_programs import Arrays
from torch import Tensor

from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.trainer.model.optimizer import orthogonal, parameter_kinds

pytestmark = [pytest.mark.process]


def plain_update(momentum: Tensor) -> Tensor:
    """Jordan's iteration for one matrix, in float64."""
    update = momentum / momentum.square().sum().sqrt()
    for _ in range(5):
        gram = update @ update.T
        update = 3.4445 * update - 4.7750 * gram @ update + 2.0315 * gram @ gram @ update
    return update


def plain_steps() -> Arrays:
    """Muon for hidden matrices and torch's AdamW for all else, in float64, and their average."""
    model = model_with_odd_matrices(torch.float64)
    parameters = dict(model.named_parameters())
    embeddings = "model.embed_tokens.weight"  # and the head
    matrices = [name for name, p in parameters.items() if p.ndim >= 2 and name != embeddings]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    adamw: Any = torch.optim.AdamW(
        [
            {
                "params": [parameters[embeddings]],
                "lr": MUON.learning_rate * MUON.embedding_lr_ratio,
                "weight_decay": MUON.embedding_weight_decay,
            },
            {
                "params": vectors,
                "lr": MUON.learning_rate * MUON.vector_lr_ratio,
                "weight_decay": MUON.vector_weight_decay,
            },
        ],
        betas=MUON.betas,
        eps=MUON.eps,
    )
    averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    momenta = {name: torch.zeros_like(parameters[name]) for name in matrices}
    for step in range(NUM_STEPS):
        given = gradients(model, step)
        for name, parameter in parameters.items():
            parameter.grad = given[name]
        adamw.step()
        for name in matrices:
            momenta[name] = 0.95 * momenta[name] + 0.05 * given[name]
            direction = 0.05 * given[name] + 0.95 * momenta[name]
            stack = [plain_update(each) for each in direction.reshape(-1, *direction.shape[-2:])]
            scale = 0.2 * max(direction.shape[-2:]) ** 0.5
            data = parameters[name].data
            data *= 1 - MUON.learning_rate * MUON.weight_decay
            data -= MUON.learning_rate * scale * torch.stack(stack).reshape(data.shape)
        for name, parameter in parameters.items():
            averages[name] = 0.9 * averages[name] + 0.1 * parameter.detach()
    whole = {name: parameter.detach() for name, parameter in parameters.items()}
    whole |= {f"{name}.ema": average for name, average in averages.items()}
    return {name: tensor.numpy() for name, tensor in whole.items()}


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_ranks_take_the_steps_of_a_plain_loop(
    tmp_path: Path, fork_server: None, num_ranks: int, num_replicas: int
) -> None:
    run = DistributedWorld(tmp_path, start_fork)

    of_ranks = run(muon_steps, "float64", num_replicas, num_ranks=num_ranks, timeout_s=60.0)

    expected = plain_steps()
    for found in of_ranks:
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-12, err_msg=name)


def test_a_float32_model_is_trained_as_torchs_muon_does(tmp_path: Path, fork_server: None) -> None:
    run = DistributedWorld(tmp_path, start_fork)

    found = run(muon_steps, "float32", 1, num_ranks=2, timeout_s=60.0)[0]

    model = model_with_odd_matrices(torch.float32)
    kinds = parameter_kinds(model, is_critic=False)
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if kinds[name] == "hidden" and parameter.ndim == 2
    }
    muon: Any = torch.optim.Muon(
        parameters.values(),
        lr=MUON.learning_rate,
        weight_decay=MUON.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(NUM_STEPS):
        given = gradients(model, step)
        for name, parameter in parameters.items():
            parameter.grad = given[name]
        muon.step()
    assert len(parameters) == 15
    start = dict(model_with_odd_matrices(torch.float32).named_parameters())
    for name, parameter in parameters.items():
        change = (parameter - start[name]).abs().max().item()
        np.testing.assert_allclose(
            found[name], parameter.detach().numpy(), rtol=0, atol=0.05 * change, err_msg=name
        )


def test_a_resume_trains_on_bit_for_bit(tmp_path: Path, fork_server: None) -> None:
    run = DistributedWorld(tmp_path, start_fork)

    one, other, errors = run(resume, str(tmp_path / "saved"), num_ranks=2, timeout_s=60.0)[0]

    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    assert "model.layers.0.mlp.up_proj.weight.momentum" in one
    assert "model.norm.weight.ema" in one
    other_optimizer, no_average = errors
    assert other_optimizer.startswith("ConfigError: checkpoint ")
    assert "was saved by another train.optimizer: optimizer." in other_optimizer
    assert "was saved without train.ema: optimizer." in no_average


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (3, 16, 16), (1, 7)])
def test_singular_vectors_stay_and_values_are_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    found = orthogonal(matrices)

    left, _, right = np.linalg.svd(matrices.numpy(), full_matrices=False)
    values = np.swapaxes(left, -2, -1) @ found.numpy() @ np.swapaxes(right, -2, -1)
    diagonal = np.diagonal(values, axis1=-2, axis2=-1)
    np.testing.assert_allclose(values, diagonal[..., None] * np.eye(values.shape[-1]), atol=1e-10)
    assert 0.6 < diagonal.min() <= diagonal.max() < 1.3


def test_a_gradient_of_zeros_changes_nothing() -> None:
    assert not orthogonal(torch.zeros(3, 4)).any()
