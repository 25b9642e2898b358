"""Activation checkpointing: the same gradients, less kept, and each block computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_packing import builder, make_batch, random_samples
from torch import Tensor, nn
from training_models import make_model

from umbra.runtime.errors import ConfigError
from umbra.trainer.model.compiling import recompute_blocks
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.train_model import (
    PassSettings,
    _Scorer,  # pyright: ignore[reportPrivateUsage]
)


def count_runs(module: nn.Module, runs: list[int], idx: int) -> None:
    def count(*_: object) -> None:
        runs[idx] += 1

    module.register_forward_pre_hook(count)


def gradients_and_cost(
    recomputes: bool, packed: bool
) -> tuple[dict[str, Tensor | None], int, list[int]]:
    """Gradients, numbers kept for the backward pass, and how often each block was computed."""
    model = make_model()
    if packed:
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
    if recomputes:
        recompute_blocks(model)
    runs = [0, 0]
    for idx, layer in enumerate(model.model.layers):
        count_runs(layer.mlp, runs, idx)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().size()
        return tensor

    samples = random_samples(1, [4, 6], [5, 9, 30, 18], group_size=2)
    ((micro_batch,),) = builder(packed).build(make_batch(samples))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        passes = PassSettings(compute_dtype=torch.float32, recomputes=recomputes)
        logprobs, _ = _Scorer(model, passes)(micro_batch.inputs, micro_batch.targets, "none")
    num_kept = sum(kept.values())
    torch.autograd.backward(logprobs.square().sum())
    named: Any = model.named_parameters()
    return {name: parameter.grad for name, parameter in named}, num_kept, runs


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_recomputed_blocks_give_the_same_gradients_from_less(packed: bool) -> None:
    gradients, num_kept, runs = gradients_and_cost(False, packed)

    recomputed, num_kept_now, runs_now = gradients_and_cost(True, packed)

    assert (runs, runs_now) == ([1, 1], [2, 2])
    torch.testing.assert_close(recomputed, gradients, atol=0, rtol=0)
    assert num_kept_now < num_kept / 2


def test_without_gradients_nothing_is_computed_twice() -> None:
    model = make_model()
    recompute_blocks(model)
    runs = [0]
    count_runs(model.model.layers[0].mlp, runs, 0)

    with torch.no_grad():
        model(torch.arange(2, 9)[None])

    assert runs == [1]


def test_a_model_without_known_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear does not declare its decoder blocks"):
        recompute_blocks(nn.Linear(2, 2))
