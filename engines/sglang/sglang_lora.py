"""Runs in SGLang's scheduler processes: replaces the LoRA adapter of the last update."""

from __future__ import annotations

import gc
import importlib
from functools import cache
from typing import Any

from torch import Tensor, nn

from umbra.engines.loading.weight_source import WeightSource
from umbra.engines.sglang.sglang_settings import SYNCED_ADAPTER
from umbra.runtime.engine_api.lora_matrices import module_shapes
from umbra.runtime.errors import WeightSyncError


def load_adapter(model: nn.Module, source: WeightSource) -> str:
    """Returns how the adapter was loaded, for the engine's log. SGLang's own call would wait for
    the last adapter's requests, which may be frozen."""
    spec = source.manifest.lora
    assert spec is not None
    # SGLang keeps adapters in host memory; the source's own memory is gone after the update.
    tensors: dict[str, Tensor] = {
        name: tensor.to("cpu", copy=True) for name, tensor in source.tensors()
    }
    modules = module_shapes(source.manifest.shapes)
    config = {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    manager = _lora_manager(model)
    named: Any = importlib.import_module("sglang.srt.lora.lora_registry").LoRARef(
        lora_id=SYNCED_ADAPTER, lora_name=SYNCED_ADAPTER, lora_path="no folder", pinned=False
    )
    if SYNCED_ADAPTER in manager.loras:
        _check_done(manager.unload_lora_adapter(named))
    _check_done(manager.load_lora_adapter_from_tensors(named, tensors, config))
    # Copies to the GPU now: SGLang would with the next batch, and end if that failed.
    manager.fetch_new_loras({SYNCED_ADAPTER})
    return f"loaded a LoRA adapter of rank {spec.rank} for {len(modules)} modules"


@cache
def _lora_manager(model: nn.Module) -> Any:
    """SGLang's manager of the model's adapters, which it gives to no weight loader."""
    kind: Any = importlib.import_module("sglang.srt.lora.lora_manager").LoRAManager
    managers = (found for found in gc.get_objects() if type(found) is kind)
    return next(manager for manager in managers if manager.base_model is model)


def _check_done(result: Any) -> None:
    if not result.success:
        raise WeightSyncError(f"SGLang refuses the LoRA adapter: {result.error_message}")
