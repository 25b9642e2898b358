"""Runs in vLLM's worker processes: loads updates, of weights or of the synced LoRA adapter. vLLM
mixes the extension into its Worker before it makes the model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from umbra.engines.loading.weight_source import WeightSource
from umbra.engines.loading.worker_updates import WorkerUpdates
from umbra.engines.vllm.vllm_loader import LayerwiseLoader
from umbra.engines.vllm.vllm_settings import SYNCED_ADAPTER
from umbra.runtime.engine_api.lora import LINEAR
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.process.thread_stacks import answer_stack_requests

_set_config: Any = importlib.import_module("vllm.config").set_current_vllm_config
_Model: Any = importlib.import_module("vllm.lora.lora_model").LoRAModel
_Config: Any = importlib.import_module("vllm.lora.peft_helper").PEFTHelper


class UmbraWorkerExtension:
    model_runner: Any
    vllm_config: Any
    _updates: WorkerUpdates | None = None

    def umbra_update(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """See `WorkerUpdates.obey`. Never raises: vLLM would read one worker's error, and leave the
        other workers' reports to the next order."""
        try:
            return self._obey(order)
        except Exception as error:  # noqa: BLE001 - the report carries any error to the engine
            return {"error": f"{type(error).__name__}: {error}"}

    def _obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Does what vLLM's own `update_weights` does around a load."""
        runner = self.model_runner
        if self._updates is None:
            model = runner.get_model()
            loader = LayerwiseLoader(model, self.vllm_config.model_config)
            self._updates = WorkerUpdates(model, loader, partial(load_adapter, runner))
        with _set_config(self.vllm_config):
            report = self._updates.obey(order)
        if "unread" in report and hasattr(runner, "reset_lora_state"):  # not in 0.26.0
            runner.reset_lora_state()  # the model has new weights: adapters are loaded again
        return report

    def umbra_measure(self) -> Mapping[str, int]:
        """The worker's pid, and bytes of its weights and KV cache while awake. From now on the
        process writes its stacks on request."""
        answer_stack_requests()
        runner = self.model_runner
        parameters: Iterator[Tensor] = runner.model.parameters()
        return {
            "pid": os.getpid(),
            "weights_nbytes": sum(parameter.nbytes for parameter in parameters),
            "kv_nbytes": sum(_nbytes(cache) for cache in runner.kv_caches),
        }


def _nbytes(cache: Any) -> int:
    if isinstance(cache, Tensor):
        return cache.nbytes
    return sum(_nbytes(part) for part in cache)


def load_adapter(runner: Any, source: WeightSource) -> str:
    """Replaces the adapter of the last update in vLLM's WorkerLoRAManager; returns how, for the
    engine's log. After a failure the last adapter stays."""
    spec = source.manifest.lora
    assert spec is not None
    worker_manager = runner.lora_manager
    manager = worker_manager._adapter_manager
    device, dtype = worker_manager.device, worker_manager.lora_config.lora_dtype
    # Copies, because the source's memory is gone after the update.
    tensors: dict[str, Tensor] = {
        name: tensor.to(device, dtype, copy=True) for name, tensor in source.tensors()
    }
    _, number = SYNCED_ADAPTER
    adapter = _Model.from_lora_tensors(
        lora_model_id=number,
        tensors=per_expert(tensors, spec.rank),
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


def per_expert(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The matrices of stacked experts (see `LoraSpec`) as vLLM has them: for each expert, and for
    gate and up apart, which share lora_A. Others stay."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stack, is_stack, rest = name.partition(".experts.")
        if not is_stack:
            found[name] = tensor
            continue
        is_first = rest.endswith("lora_A.weight")
        if is_first:
            parts = tensor.view(-1, rank, tensor.shape[1])
        else:
            parts = tensor.view(len(tensor), rank, -1).permute(2, 0, 1)
        for number, part in enumerate(parts):
            split = {"down_proj": part}
            if rest.startswith("base_layer."):
                gate, up = (part, part) if is_first else part.chunk(2)
                split = {"gate_proj": gate, "up_proj": up}
            end = LINEAR[0] if is_first else LINEAR[1]
            found |= {f"{stack}.experts.{number}.{n}{end}": each for n, each in split.items()}
    return found


def _renaming(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # The first is 0.32's name. Both leave out which modules are packed into one.
    renaming = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    return renaming()
