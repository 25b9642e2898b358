"""Programs of the ranks in loading tests; imported by name in each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_programs import MAX_NEW_TOKENS, make_world, rank_batch
from torch.distributed.tensor import DTensor
from whole_model import load_whole_model

from umbra.runtime.weights.shards import find_aliases
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.model_loading import prepare_causal_lm
from umbra.trainer.model.policy import Policy
from umbra.trainer.world import World


def compare_loading(cases: list[list[str]], device_type: str = "cpu") -> list[dict[str, Any]]:
    """For each [model directory, dtype, wrap]: how both ways of loading differ on this rank."""
    world = make_world(device_type)
    return [_compare(world, *case) for case in cases]


def _compare(world: World, folder: str, dtype_name: str, wrap: Any) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    section = ModelSection(path=Path(folder))
    prepared = prepare_causal_lm(section, dtype)
    model, is_packed = load_whole_model(section, dtype)
    assert prepared.is_packed == is_packed
    held = [p.is_meta for p in prepared.model.parameters()]
    ours = Policy(
        prepared.model,
        world.mesh,
        is_packed=is_packed,
        compute_dtype=dtype,
        wrap=wrap,
        weights=prepared.weights,
    )
    theirs = Policy(model, world.mesh, is_packed=is_packed, compute_dtype=dtype, wrap=wrap)
    assert list(ours.tensors) == list(theirs.tensors)
    assert find_aliases(ours.tensors) == find_aliases(theirs.tensors)
    return {
        "sharded": all(held),
        "tensors": len(ours.tensors),
        "unequal": [
            name for name, value in theirs.tensors.items() if not _equal(ours.tensors[name], value)
        ],
        "unequal_buffers": [
            name
            for name, value in theirs.model.named_buffers()
            if not _equal(ours.model.get_buffer(name), value)
        ],
        "same_logprobs": torch.equal(_logprobs(ours, world), _logprobs(theirs, world)),
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor):
        one, other = one.to_local(), other.to_local()
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


@torch.no_grad()
def _logprobs(policy: Policy, world: World) -> torch.Tensor:
    builder = MicroBatchBuilder(
        packed=policy.is_packed,
        dtype=policy.compute_dtype,
        device=world.device,
        aggregation="token",
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return policy.scores(builder.build(rank_batch(world, 3, 1))[0]).logprobs
