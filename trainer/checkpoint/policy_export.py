"""Exports the policy as a Hugging Face directory, for transformers or an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.trainer.checkpoint.model_folder import MAX_SHARD_NBYTES, correct_config, model_folder
from umbra.trainer.model.policy import Policy
from umbra.trainer.world import World, barrier, from_lead


def export_policy(
    policy: Policy, target: Path, world: World, *, source: Path, dtype: torch.dtype
) -> Path:
    """Writes config, safetensors in `dtype` and tokenizer to `target`. Collective.

    An existing `target` is replaced once the new one is complete, see `replacing_folder`. Until
    then rank 0 holds a full copy of the weights.

    Args:
        source: the model directory training started from; its tokenizer is copied.

    Raises:
        RunDirectoryError: disk full, read-only or the like, on every rank.
    """
    full = _gather(policy, world, dtype)
    from_lead(world, lambda: write_whole_model(policy.model, full, target, source, dtype))
    return target


def write_whole_model(
    model: nn.Module, tensors: dict[str, Tensor], target: Path, source: Path, dtype: torch.dtype
) -> None:
    """Has transformers write the model with these weights, which are in `dtype`. It renames what
    it renamed when it loaded the model.

    Raises:
        RunDirectoryError: disk full, read-only or the like.
    """
    any_model: Any = model
    needed_nbytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors.values()}.values())
    with model_folder(target, source, needed_nbytes) as folder:
        any_model.save_pretrained(
            folder,
            state_dict=tensors,
            safe_serialization=True,
            max_shard_size=MAX_SHARD_NBYTES,
        )
        # transformers writes the dtype of the live model, not that of the tensors.
        correct_config(folder / "config.json", dtype)


def _gather(policy: Policy, world: World, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors, unsharded, in host memory of rank 0; nothing elsewhere. Collective."""
    full: dict[str, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for name, tensor in policy.tensors.items():
        data = tensor.detach()
        if id(tensor) not in wholes:
            whole = data.full_tensor() if isinstance(data, DTensor) else data
            if world.is_lead:
                kept = whole.dtype if not whole.is_floating_point() else dtype
                whole = whole.to("cpu", kept, copy=True)
            wholes[id(tensor)] = whole if world.is_lead else torch.empty(0)
        if world.is_lead:
            full[name] = wholes[id(tensor)]
    barrier()
    return full
