"""AdamW with moments of 8 bits: its updates beside AdamW's, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_ranks import start_fork
from optimizer_programs import adamw_8bit_steps
from torch import Tensor, nn

from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.adamw_8bit import block_size
from umbra.trainer.model.optimizer import ModelOptimizer

pytestmark = [pytest.mark.process]
TRAIN = TrainSection(
    steps=1,
    learning_rate=1e-3,
    embedding_lr_ratio=0.5,
    max_grad_norm=0.0,
    weight_decay=0.1,
    optimizer="adamw_8bit",
)


def last_move(train: TrainSection, gradients: Callable[[int], Tensor], num_steps: int) -> Tensor:
    """What the last step does to parameters that were 0, one element for each of the gradient's."""
    parameter = nn.Parameter(torch.zeros_like(gradients(0)))
    optimizer = ModelOptimizer({"weight": parameter}, {"weight": "embedding"}, train)
    before = parameter.detach().clone()
    for step in range(num_steps):
        before = parameter.detach().clone()
        parameter.grad = gradients(step)
        optimizer.step(step)
    return parameter.detach() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moves_are_adamws_where_gradients_are_of_all_sizes_and_rows_get_none(
    dtype: torch.dtype,
) -> None:
    def gradients(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        found = torch.randn(9, 256, generator=generator) * torch.logspace(0, -5, 256)
        found[step % 3 :: 3] *= step < 4  # as rows of an embedding whose tokens are absent
        return found.to(dtype)

    found = last_move(TRAIN, gradients, 8)

    exact = last_move(replace(TRAIN, optimizer="adamw"), gradients, 8)
    assert (found - exact).abs().mean() < 0.1 * exact.abs().mean()
    assert (found - exact).abs().max() < 0.3 * exact.abs().max()


def test_moments_follow_changes_of_less_than_a_level() -> None:
    def gradients(step: int) -> Tensor:
        found = torch.full((2, 64), 1.0 if step < 10 else 0.1)
        found[:, 0] = 1.0  # the largest stays, and with it the levels
        return found

    found = last_move(TRAIN, gradients, 400)

    exact = last_move(replace(TRAIN, optimizer="adamw"), gradients, 400)
    np.testing.assert_allclose(found.numpy(), exact.numpy(), rtol=0.25)


def test_more_than_a_chunk_moves_as_its_parts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(step: int) -> Tensor:
        return torch.randn(10, 96, generator=torch.Generator().manual_seed(step))

    whole = last_move(TRAIN, gradients, 3)
    monkeypatch.setattr("umbra.trainer.model.adamw_8bit._CHUNK", 4)

    assert torch.equal(last_move(TRAIN, gradients, 3), whole)


@pytest.mark.parametrize(
    ("shape", "size"), [((8, 512), 256), ((3, 4, 576), 64), ((8, 48), 0), ((512,), 0)]
)
def test_blocks_divide_rows(shape: tuple[int, ...], size: int) -> None:
    assert block_size(torch.zeros(shape)) == size


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_resume_trains_on_bit_for_bit(tmp_path: Path, fork_server: None, num_ranks: int) -> None:
    run = DistributedWorld(tmp_path, start_fork)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    whole, error = run(adamw_8bit_steps, one, 0, 4, num_ranks=2, timeout_s=60.0)[0]
    run(adamw_8bit_steps, two, 0, 2, num_ranks=2, timeout_s=60.0)
    resumed, _ = run(adamw_8bit_steps, two, 2, 4, num_ranks=num_ranks, timeout_s=60.0)[0]

    rounded = {name for name in whole if f"{name}.exp_avg_8bit" in whole or "_8bit" in name}
    assert whole.keys() == resumed.keys()
    assert whole.keys() - rounded >= {"model.norm.weight", "model.norm.weight.exp_avg"}
    for name in rounded if num_ranks == 3 else whole:  # the kernels of shorter shards round others
        np.testing.assert_array_equal(whole[name], resumed[name], err_msg=name)
    codes = whole["model.layers.0.mlp.up_proj.weight.exp_avg_8bit"]
    assert codes.dtype == np.uint8
    assert len(np.unique(codes)) > 50
    assert "was saved by another train.optimizer: optimizer." in error
