"""Writes Hugging Face model directories: of a checkpoint (`umbra export`) and of the policy.
Adapters are merged into the weights, and also in the folder `adapter`, as PEFT saves them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.runtime.disk import check_free_space
from umbra.runtime.engine_api.lora import is_of_experts, module_shapes
from umbra.runtime.engine_api.weight_files import (
    has_own_head,
    local_model,
    snapshot_name,
    untied,
)
from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import from_wire
from umbra.runtime.text.model_files import read_model_config
from umbra.trainer.checkpoint.checkpoint_store import StoredParameters
from umbra.trainer.checkpoint.file_digests import find_damage
from umbra.trainer.checkpoint.run_dir import check_base, recorded_model
from umbra.trainer.checkpoint.trainer_state import check_complete, read_trainer_state
from umbra.trainer.config.trainer_config import LoraSection, ModelSection
from umbra.trainer.model.lora_layers import (
    adapted_layers,
    adapter_shapes,
    merged,
    origin,
    peft_names,
)
from umbra.trainer.model.model_loading import prepare_causal_lm
from umbra.trainer.model.stored_weights import StoredWeights, distinct_tensors
from umbra.trainer.model.train_model import PreparedModel, TrainModel
from umbra.trainer.world.mesh import Mesh, barrier, from_lead
from umbra.trainer.world.run_files import RunDirectoryError, replacing_folder, writing

ADAPTER: Final = "adapter"
"""The folder of the adapters, in that of the model with them."""
MAX_SHARD_NBYTES: Final = 5 * 10**9
"""Size of a file of weights. Larger files take more memory in an export of a checkpoint; with
smaller ones, large models have very many."""
# Copied from the directory that the model came from; training does not change them.
_COPIED: Final = (
    "tokenizer*",  # .json, _config.json, .model
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",  # of SentencePiece, or tiktoken's
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",  # vLLM and SGLang read it for models that take images
    "*.py",
)


def run(arguments: argparse.Namespace) -> int:
    """Exports, and prints the directory. Raises ConfigError if the checkpoint is incomplete, its
    run's model is unknown, or the directory exists."""
    checkpoint = Path(arguments.checkpoint)
    check_complete(checkpoint)
    run_dir = checkpoint.absolute().parents[1]
    target = Path(arguments.out or f"{run_dir.name}-{checkpoint.name}")
    if target.exists():
        raise ConfigError(f"{target.absolute()} exists: remove it, or name another directory")
    section = recorded_model(run_dir, arguments.model)
    section = replace(section, path=Path(local_model(str(section.path), with_weights=True)))
    export_checkpoint(section, checkpoint, target, is_average=arguments.ema)
    print(target)
    return 0


def export_checkpoint(
    section: ModelSection,
    checkpoint: Path,
    target: Path,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    *,
    is_average: bool = False,
) -> None:
    """Writes config, safetensors in `section.dtype` and tokenizer of a complete checkpoint, with
    the trained weights or their moving average. An existing `target` is replaced once the new one
    is complete.

    Tensors are read one by one, and one file of weights is in memory at a time. The whole model is
    in memory only if transformers converts the weights of `section.path`, the model that the run
    started from. Raises ConfigError if the checkpoint is of another model or lacks the average,
    DataError if a model cannot be read, and RunDirectoryError if `target` cannot be written.
    """
    if damage := find_damage(checkpoint):
        raise RunDirectoryError(
            f"the checkpoint {checkpoint} is damaged: {damage}; name another one, or restore it "
            "from a backup"
        )
    state = read_trainer_state(checkpoint)
    section = replace(section, lora=from_wire(LoraSection, state.lora))
    check_base(checkpoint, state, origin(section).get("base", ""))
    dtype: torch.dtype = getattr(torch, section.compute_dtype)
    prepared = prepare_causal_lm(replace(section, attention="padded"), dtype)
    saved = StoredParameters(checkpoint, is_average=is_average)
    trained = _Trained(prepared, saved, section.lora, dtype)
    if prepared.weights is None:
        model = prepared.model
        for name, parameter in model.named_parameters():
            parameter.data.copy_(trained.read(name, parameter.data))
        write_whole_model(model, model.state_dict(), target, section, dtype, trained.adapters)
        return
    tensors = _Tensors(prepared.model, prepared.weights, trained, dtype)
    config = read_model_config(section.path)
    changes = untied(config) if has_own_head(section.path, config) else {}
    with model_folder(target, section.path, sum(tensors.sizes.values())) as folder:
        copy_files(section.path, folder, ("config.json", "generation_config.json"))
        correct_config(folder / "config.json", dtype, changes)
        write_shards(folder, tensors.sizes, tensors.read, max_shard_nbytes)
        write_adapters(folder, section, trained.adapters, dtype)


class _Trained:
    """A checkpoint's parameters of a model: all, or with LoRA the `adapters`, by name, in at least
    float32, as engines get them merged. Raises ConfigError if it is of another model."""

    def __init__(
        self, start: PreparedModel, saved: StoredParameters, lora: LoraSection, dtype: torch.dtype
    ) -> None:
        self._saved, model = saved, start.model
        self._scale = 0.0
        self.adapters: dict[str, Tensor] = {}
        if not lora.rank:
            saved.check_fit(dict(model.named_parameters()), start.path)
            return
        self._scale = lora.scale
        shapes: dict[str, Tensor] = {}
        for name, layer in adapted_layers(model, lora).items():
            for matrix, shape in adapter_shapes(name, layer, lora.rank).items():
                shapes[matrix] = torch.empty(shape, device="meta")
        saved.check_fit(shapes, start.path)
        wide = torch.promote_types(dtype, torch.float32)
        self.adapters = {name: saved.read(name, wide) for name in shapes}

    def read(self, name: str, start: Tensor) -> Tensor:
        """A parameter in the dtype of `start`, its value in the model's directory, which may be
        without one if the checkpoint has the parameter."""
        if not self._scale:
            return self._saved.read(name, start.dtype)
        return merged(name, start, self.adapters, self._scale)

    @property
    def needs_start(self) -> bool:
        return self._scale > 0


class _Tensors:
    """A model's tensors under the names that they have in the directory it started from, with their
    `sizes` in bytes of `dtype`."""

    def __init__(
        self,
        model: nn.Module,
        start: StoredWeights,
        trained: _Trained,
        dtype: torch.dtype,
    ) -> None:
        self._start = start
        self._trained = trained
        self._dtype = dtype
        self._parameters: dict[str, tuple[str, Tensor]] = {}
        self._buffers: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        parameters = dict(model.named_parameters())
        for names, tensor in distinct_tensors(model):
            name = next(each for each in names if each in start.names)
            own_name = next((each for each in names if each in parameters), "")
            if own_name:
                self._parameters[name] = own_name, tensor
                self.sizes[name] = tensor.numel() * dtype.itemsize
            else:  # training changes no buffers, and checkpoints have none
                start.fill({name: tensor})
                self._buffers[name] = tensor
                self.sizes[name] = tensor.nbytes

    def read(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        own_name, tensor = self._parameters[name]
        start = torch.empty_like(tensor, dtype=self._dtype, device="cpu")
        if self._trained.needs_start:
            self._start.fill({name: start})
        return self._trained.read(own_name, start)


def export_policy(
    policy: TrainModel, target: Path, mesh: Mesh, *, source: ModelSection, dtype: torch.dtype
) -> Path:
    """Writes config, safetensors in `dtype` and the tokenizer of `source`, where training started,
    to `target`. Collective.

    An existing `target` is replaced once the new one is complete. Until then rank 0 holds a full
    copy of the weights. Raises RunDirectoryError on every rank if the disk is full or the like.
    """
    adapters = policy.stored if policy.adapters else {}
    full = _gather(policy.tensors, mesh, dtype, kept={**policy.buffers, **adapters})

    def write() -> None:
        matrices = {name: full.pop(name) for name in adapters}
        for name, weight in full.items() if matrices else ():
            full[name] = merged(name, weight, matrices, source.lora.scale)
        write_whole_model(policy.model, full, target, source, dtype, matrices)

    from_lead(mesh, write)
    return target


def write_whole_model(
    model: nn.Module,
    tensors: dict[str, Tensor],
    target: Path,
    source: ModelSection,
    dtype: torch.dtype,
    adapters: Mapping[str, Tensor] = {},
) -> None:
    """Has transformers write the model with these weights, which are in `dtype`. transformers
    undoes its renaming of the stored tensors."""
    any_model: Any = model
    needed_nbytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors.values()}.values())
    with model_folder(target, source.path, needed_nbytes) as folder:
        any_model.save_pretrained(
            folder,
            state_dict=tensors,
            safe_serialization=True,
            max_shard_size=MAX_SHARD_NBYTES,
        )
        # transformers writes the dtype of the live model, not that of the tensors.
        correct_config(folder / "config.json", dtype)
        write_adapters(folder, source, adapters, dtype)


def write_adapters(
    folder: Path, source: ModelSection, adapters: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Writes the folder `adapter`, if there are any, as PEFT's save_pretrained does."""
    if not adapters:
        return
    lora, path, hub_name = source.lora, folder / ADAPTER, snapshot_name(source.path)
    modules = module_shapes({name: tuple(matrix.shape) for name, matrix in adapters.items()})
    layers = [name for name in modules if not is_of_experts(name)]
    targets = [target for target in lora.targets if not is_of_experts(target)]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_name or str(source.path.resolve()),
        "revision": source.path.name if hub_name else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": targets or sorted({name.rpartition(".")[2] for name in layers}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    if len(layers) < len(modules):
        config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    matrices = {name: each.to(dtype).contiguous() for name, each in peft_names(adapters).items()}
    save_file(matrices, path / "adapter_model.safetensors", metadata={"format": "pt"})


def _gather(
    tensors: Mapping[str, Tensor], mesh: Mesh, dtype: torch.dtype, kept: Collection[str]
) -> dict[str, Tensor]:
    """All tensors, unsharded, in host memory of rank 0; nothing elsewhere. They are cast to
    `dtype`, except those whose names are in `kept`. Collective."""
    full: dict[str, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        data = tensor.detach()
        if id(tensor) not in wholes:
            whole = data.full_tensor() if isinstance(data, DTensor) else data
            if mesh.is_lead:
                whole = whole.to("cpu", whole.dtype if name in kept else dtype, copy=True)
            wholes[id(tensor)] = whole if mesh.is_lead else torch.empty(0)
        if mesh.is_lead:
            full[name] = wholes[id(tensor)]
    barrier()
    return full


@contextmanager
def model_folder(target: Path, source: Path, needed_nbytes: int) -> Generator[Path]:
    """An empty folder for config and weights, which replaces `target` when the block ends, with the
    tokenizer of `source`. Raises RunDirectoryError if the disk is full or the like."""
    with writing("export the model to", target, needed_nbytes), replacing_folder(target) as folder:
        check_free_space(folder, needed_nbytes)
        yield folder
        copy_files(source, folder, _COPIED)


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        for path in filter(Path.is_file, source.glob(pattern)):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(path, target)


def correct_config(
    path: Path, dtype: torch.dtype, changes: Mapping[str, Any] | None = None
) -> None:
    """Corrects a config.json that was written for another copy of the model."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    for key, value in (changes or {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_shards(
    folder: Path, sizes: Mapping[str, int], read: Callable[[str], Tensor], max_nbytes: int
) -> None:
    """Writes tensors as safetensors, with an index if there are several files. `sizes` are in
    bytes; one file's tensors are in memory at a time, and a tensor above `max_nbytes` has a
    file of its own."""
    library: Any = huggingface_hub
    split = library.split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_nbytes,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index: dict[str, Any] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
