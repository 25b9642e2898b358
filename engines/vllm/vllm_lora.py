"""Runs in vLLM's worker processes: replaces the LoRA adapter of the last update."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from umbra.engines.loading.weight_source import WeightSource
from umbra.engines.vllm.vllm_settings import SYNCED_ADAPTER
from umbra.runtime.errors import WeightSyncError

_Model: Any = importlib.import_module("vllm.lora.lora_model").LoRAModel
_Config: Any = importlib.import_module("vllm.lora.peft_helper").PEFTHelper


def load_adapter(worker_manager: Any, source: WeightSource) -> str:
    """Returns how vLLM's WorkerLoRAManager loaded it. After a failure the last adapter stays."""
    spec = source.manifest.lora
    assert spec is not None
    manager = worker_manager._adapter_manager
    device, dtype = worker_manager.device, worker_manager.lora_config.lora_dtype
    # Copies, because the source's memory is gone after the update.
    tensors: dict[str, Tensor] = {
        name: tensor.to(device, dtype, copy=True) for name, tensor in source.tensors()
    }
    _, number = SYNCED_ADAPTER
    adapter = _Model.from_lora_tensors(
        lora_model_id=number,
        tensors=tensors,
        peft_helper=_Config(r=spec.rank, lora_alpha=spec.alpha, target_modules=[]),
        device=str(device),
        dtype=dtype,
        model_vocab_size=worker_manager.vocab_size,
        weights_mapper=_renaming(manager.model),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    places = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    if unplaced := sorted(adapter.loras.keys() - places):
        raise WeightSyncError(
            f"vLLM applies no LoRA adapter to {len(unplaced)} of the modules that this one is for: "
            f"{', '.join(unplaced[:5])}"
        )
    manager.remove_adapter(number)
    manager.add_adapter(adapter)
    manager.activate_adapter(number)
    # vLLM computes with copies of the matrices, in memory that sleeps with the weights. It would
    # read these again only after another adapter had taken their slot, and there is no other.
    adapter.loras.clear()
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # the ranks' memory is read
        torch.cuda.empty_cache()
    return f"loaded a LoRA adapter of rank {spec.rank} for {len(tensors) // 2} modules"


def _renaming(model: Any) -> Any:
    """vLLM's map from checkpoint names to module names; None if they are equal."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # The first is 0.32's name. Both leave out which modules are packed into one.
    renaming = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    return renaming()
