"""In vLLM's worker processes: loads the weights of an update by vLLM's own loaders.

vLLM imports this module as its worker extension before it makes the model; importing it registers
the weight transfer engine. After loading, layerwise reload rebuilds what each layer derives from
its weights (prepacked for the CPU, quantised, fused).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from umbra.engines.shell.weight_source import Regions, open_weights
from umbra.engines.vllm.vllm_settings import TRANSFER_BACKEND
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.process.thread_stacks import answer_stack_requests
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import probe_import

_base: Any = importlib.import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine
_factory: Any = importlib.import_module(
    "vllm.distributed.weight_transfer.factory"
).WeightTransferEngineFactory
_reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
_layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")

_embedding: Any = importlib.import_module(
    "vllm.model_executor.layers.vocab_parallel_embedding"
).VocabParallelEmbedding


@dataclass(frozen=True, slots=True)
class InitInfo:
    """Empty: nothing needs to be agreed on beforehand."""


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """See `umbra.engines.shell.weight_source`."""

    description: dict[str, Any]


class SourceTransferEngine(_base):
    """Loads all weights at once: start, one update, finish.

    `regions` is what the last update has read.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    regions: Regions = []  # noqa: RUF012 - never changed in place
    _ties: dict[str, str] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._ties is None:  # found once: a failed update may leave the model half-loaded
            self._ties = _ties(self.model)
        self._forget_half_loaded()
        _reload.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises WeightSyncError if a parameter gets no value; vLLM raises for unknown names."""
        description = _on_this_node(update_info.description)
        with open_weights(description, self.device, counts=_is_first()) as source:
            loaded: set[str] | None = self.model.load_weights(source.tensors())
        self.regions = source.regions
        self._check_complete(loaded)
        if not self.model_config.quantization:
            _check_whole(self.model)

    def finish_weight_update(self) -> None:
        _reload.finalize_layerwise_reload(self.model, self.model_config)
        for name in self._ties or {}:
            # Layerwise reload (0.32) leaves out layers that got their weights by a tie.
            layer: Any = self.model.get_submodule(name.rpartition(".")[0])
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # others are time-sliced with this engine

    def _check_complete(self, loaded: set[str] | None) -> None:
        if loaded is None:  # the model's loader does not report what it loaded
            return
        names: list[str] = [name for name, _ in self.model.named_parameters()]
        ties = self._ties or {}
        missing = sorted(
            _plain(name)
            for name in names
            if loaded.isdisjoint((_plain(name), _plain(ties.get(name, name))))
        )
        if missing:
            raise WeightSyncError(
                f"the trainer's weights do not fill {len(missing)} of vLLM's parameters: "
                f"{', '.join(missing[:5])}"
            )

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Required by vLLM before 0.32; umbra's trainer publishes instead."""
        raise NotImplementedError

    def _forget_half_loaded(self) -> None:
        """Clears the tensors of a failed update, with which vLLM (0.32) would otherwise
        continue."""
        for layer in self.model.modules():
            info: Any = _layerwise.get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0


def _plain(name: str) -> str:
    """A parameter's name as in the checkpoint, even if an adapter wraps its layer."""
    return name.replace(".base_layer.", ".")


def _on_this_node(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where this worker finds an update, of which a follower has a copy on its own node."""
    paths: Sequence[str] = description.get("paths", ())
    if not paths:
        return description
    part = torch.distributed.get_rank() * len(paths) // torch.distributed.get_world_size()
    if part == 0:
        return description
    # Without the progress, which is in memory of the leading part's node.
    kept = {name: description[name] for name in ("manifest", "nbytes")}
    return {**kept, "path": paths[part]}


def _is_first() -> bool:
    """Whether this is the first of the engine's workers."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _check_whole(model: nn.Module) -> None:
    """Raises WeightSyncError for a layer that got some of its weights, such as q without k."""
    modules: Any = model
    for name, layer in modules.named_modules():
        info: Any = _layerwise.get_layerwise_info(layer)
        if not info.can_load() or isinstance(layer, _embedding):  # embeddings have padding
            continue
        if 0 < info.load_numel < info.load_numel_total:
            raise WeightSyncError(
                f"the trainer's weights fill {info.load_numel} of {info.load_numel_total} elements "
                f"of vLLM's layer {name}"
            )


def _ties(model: nn.Module) -> dict[str, str]:
    """Maps second names of tied parameters to the first."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return ties


class UmbraWorkerExtension:
    """Mixed into vLLM's worker; runs in each worker process."""

    model_runner: Any
    weight_transfer_engine: Any

    def umbra_probe_import(self, allocations: Sequence[object]) -> str:
        """Why the ranks' memory cannot be read here, or ""."""
        return probe_import(allocations)

    def umbra_regions(self) -> Regions:
        """The regions that the last update has read."""
        regions: Regions = self.weight_transfer_engine.regions
        return regions

    def umbra_pid(self) -> int:
        """Pid of the worker's process, which from now on writes its stacks on request."""
        answer_stack_requests()
        return os.getpid()

    def umbra_memory(self) -> Mapping[str, int]:
        """Bytes of the weights and of the KV cache when awake."""
        runner = self.model_runner
        parameters: Iterator[Tensor] = runner.model.parameters()
        return {
            "weights_nbytes": sum(parameter.nbytes for parameter in parameters),
            "kv_nbytes": sum(_nbytes(cache) for cache in runner.kv_caches),
        }


def _nbytes(cache: Any) -> int:
    if isinstance(cache, Tensor):
        return cache.nbytes
    return sum(_nbytes(part) for part in cache)


_factory.register_engine(TRANSFER_BACKEND, SourceTransferEngine)
