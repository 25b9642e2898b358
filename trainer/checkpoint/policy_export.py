"""Exports the policy as a Hugging Face directory, for transformers or an engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.disk import check_free_space
from umbra.trainer.checkpoint.checkpoint_store import load_parameters
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.model.model_loading import load_policy
from umbra.trainer.model.policy import Policy
from umbra.trainer.run_files import replacing_folder, writing
from umbra.trainer.world import World, barrier, from_lead

_ALONE_S: Final = 60.0
"""Limit for collectives of a single process, which wait for nobody."""
# Copied from the directory that the model came from; training does not change them.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


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
    from_lead(world, lambda: _write(policy, full, target, source, dtype))
    return target


def export_checkpoint(config: TrainerConfig, checkpoint: Path, target: Path) -> None:
    """Exports the policy of a complete checkpoint, on the CPU of this process alone.

    Raises:
        ConfigError: it is of another model than the config's.
        DataError, RunDirectoryError: the model or the checkpoint cannot be read, or `target`
            cannot be written.
    """
    config = replace(config, train=replace(config.train, compile=False))
    with World.join(TorchrunEnvironment.read(), "cpu", _ALONE_S) as world:
        policy = load_policy(config, world.mesh)
        load_parameters(checkpoint, policy.parameters)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        export_policy(policy, target, world, source=config.model.path, dtype=dtype)


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


def _write(
    policy: Policy, tensors: dict[str, Tensor], target: Path, source: Path, dtype: torch.dtype
) -> None:
    model: Any = policy.model
    needed_nbytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors.values()}.values())
    with writing("export the model to", target, needed_nbytes), replacing_folder(target) as folder:
        check_free_space(folder, needed_nbytes)
        model.save_pretrained(folder, state_dict=tensors, safe_serialization=True)
        _set_dtype(folder / "config.json", dtype)
        for name in _TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copy2(source / name, folder / name)


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Corrects the dtype: transformers writes that of the live model, not that of the tensors."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
