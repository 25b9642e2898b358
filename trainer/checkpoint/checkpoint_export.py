"""`umbra export`: writes a checkpoint as a Hugging Face directory, without GPUs or other ranks."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from umbra.runtime.engine_api.hub_snapshot import local_model
from umbra.runtime.engine_api.weight_files import has_own_head, untied
from umbra.runtime.errors import ConfigError
from umbra.runtime.text.model_files import read_model_config
from umbra.trainer.checkpoint.checkpoint_store import StoredParameters, load_parameters
from umbra.trainer.checkpoint.file_digests import find_damage
from umbra.trainer.checkpoint.model_folder import (
    MAX_SHARD_NBYTES,
    copy_files,
    correct_config,
    model_folder,
    write_shards,
)
from umbra.trainer.checkpoint.policy_export import write_whole_model
from umbra.trainer.checkpoint.run_dir import recorded_model
from umbra.trainer.checkpoint.trainer_state import is_complete
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.model_loading import prepare_causal_lm
from umbra.trainer.model.stored_weights import StoredWeights, distinct_tensors
from umbra.trainer.run_files import RunDirectoryError


def run(arguments: argparse.Namespace) -> int:
    """Exports, and prints the directory; returns 0.

    Raises:
        ConfigError: the checkpoint is incomplete, its run's model is unknown, or the directory
            exists.
        DataError, RunDirectoryError: as `export_checkpoint`.
    """
    checkpoint = Path(arguments.checkpoint)
    if not is_complete(checkpoint):
        raise ConfigError(
            f"{checkpoint} is not a complete checkpoint: name one of the folders in "
            "RUN_DIR/checkpoints"
        )
    run_dir = checkpoint.absolute().parents[1]
    target = Path(arguments.out or f"{run_dir.name}-{checkpoint.name}")
    if target.exists():
        raise ConfigError(f"{target.absolute()} exists: remove it, or name another directory")
    section = recorded_model(run_dir, arguments.model)
    section = replace(section, path=Path(local_model(str(section.path), with_weights=True)))
    export_checkpoint(section, checkpoint, target)
    print(target)
    return 0


def export_checkpoint(
    section: ModelSection, checkpoint: Path, target: Path, max_shard_nbytes: int = MAX_SHARD_NBYTES
) -> None:
    """Writes config, safetensors in `section.dtype` and tokenizer. An existing `target` is replaced
    once the new one is complete.

    Tensors are read one by one, and one file of weights is in memory at a time. The whole model is
    in memory only if transformers converts the weights of `section.path` when it loads them.

    Args:
        section: the model that the run started from.
        checkpoint: a complete one.

    Raises:
        ConfigError: it is of another model.
        DataError, RunDirectoryError: the model or the checkpoint cannot be read, or `target`
            cannot be written.
    """
    if damage := find_damage(checkpoint):
        raise RunDirectoryError(
            f"the checkpoint {checkpoint} is damaged: {damage}; name another one, or restore it "
            "from a backup"
        )
    dtype: torch.dtype = getattr(torch, section.compute_dtype)
    prepared = prepare_causal_lm(replace(section, attention="padded"), dtype)
    if prepared.weights is None:
        model = prepared.model
        load_parameters(checkpoint, dict(model.named_parameters()))
        write_whole_model(model, model.state_dict(), target, section.path, dtype)
        return
    tensors = _Tensors(prepared.model, prepared.weights, StoredParameters(checkpoint), dtype)
    config = read_model_config(section.path)
    changes = untied(config) if has_own_head(section.path, config) else {}
    with model_folder(target, section.path, sum(tensors.sizes.values())) as folder:
        copy_files(section.path, folder, ("config.json", "generation_config.json"))
        correct_config(folder / "config.json", dtype, changes)
        write_shards(folder, tensors.sizes, tensors.read, max_shard_nbytes)


class _Tensors:
    """A model's tensors under the names that they have in the directory it started from.

    Attributes:
        sizes: bytes of each, in `dtype`.

    Raises:
        ConfigError: the checkpoint is of another model.
    """

    def __init__(
        self,
        model: nn.Module,
        start: StoredWeights,
        trained: StoredParameters,
        dtype: torch.dtype,
    ) -> None:
        self._trained = trained
        self._dtype = dtype
        self._saved_names: dict[str, str] = {}
        self._buffers: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        parameters = dict(model.named_parameters())
        trained.check_fit(parameters)
        for names, tensor in distinct_tensors(model):
            name = next(each for each in names if each in start.names)
            saved_name = next((each for each in names if each in parameters), "")
            if saved_name:
                self._saved_names[name] = saved_name
                self.sizes[name] = tensor.numel() * dtype.itemsize
            else:  # training changes no buffers, and checkpoints have none
                start.fill({name: tensor})
                self._buffers[name] = tensor
                self.sizes[name] = tensor.nbytes

    def read(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        return self._trained.read(self._saved_names[name], self._dtype)
