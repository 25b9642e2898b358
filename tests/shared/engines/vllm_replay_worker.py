"""One tensor-parallel worker with vLLM's own models, without an engine around it.

python vllm_replay_worker.py RANK NUM_WORKERS STORE FOLDER...     a file to meet at, models' folders

Loads two versions of the weights in each folder through a recorded plan, and prints as JSON what
was copied and which parameters differ from those that vLLM's loader alone makes.

The models are on a GPU if vLLM finds one. On the CPU they are as on a GPU, not prepacked.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sharded_source import ShardedSource, rows
from torch import Tensor, nn

from umbra.engines.loading.copy_plan import CopyPlan
from umbra.engines.loading.worker_updates import WorkerUpdates

_UNPACKED = (
    ("layers.linear", "UnquantizedLinearMethod"),
    ("layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ("layers.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
)


def main(rank: int, num_workers: int, store: str, folders: Sequence[str]) -> None:
    configs = [configure(folder, num_workers=num_workers) for folder in folders]
    set_config: Any = import_module("vllm.config").set_current_vllm_config
    with set_config(configs[-1]):  # vLLM makes the group of experts for such a model only
        join(rank, num_workers, store)
    for folder, vllm_config in zip(folders, configs, strict=True):
        with set_config(vllm_config):
            print(json.dumps(_replay(Path(folder), vllm_config)), flush=True)
    torch.distributed.destroy_process_group()


def configure(folder: str, *, num_workers: int = 1, **options: Any) -> Any:
    arguments: Any = import_module("vllm.engine.arg_utils").EngineArgs(
        **options,
        model=folder,
        dtype="bfloat16",
        tensor_parallel_size=num_workers,
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
    )
    return arguments.create_engine_config()


def join(rank: int, num_workers: int, store: str) -> None:
    parallel: Any = import_module("vllm.distributed.parallel_state")
    where = f"file://{store}"
    backend = "gloo" if is_cpu() else "nccl"
    parallel.init_distributed_environment(num_workers, rank, where, rank, backend)
    parallel.initialize_model_parallel(num_workers)


def keep_unpacked() -> None:
    """Layers that are not quantised stay as on a GPU."""
    for module, name in _UNPACKED:
        method = getattr(import_module(f"vllm.model_executor.{module}"), name)
        method.process_weights_after_loading = _leave


def _leave(self: Any, layer: nn.Module) -> None:
    """Takes the place of prepacking."""


def is_cpu() -> bool:
    return bool(import_module("vllm.platforms").current_platform.is_cpu())


def _make_model(vllm_config: Any) -> nn.Module:
    """A model as in an engine that has started, with arbitrary weights."""
    if is_cpu():
        keep_unpacked()
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    config = vllm_config.model_config
    # A model for each: vLLM refuses a second layer of the same name in one configuration.
    vllm_config.compilation_config.static_forward_context.clear()
    previous = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device(vllm_config.device_config.device):
            model = loading.initialize_model(vllm_config=vllm_config, model_config=config).eval()
    finally:
        torch.set_default_dtype(previous)
    _process(model, vllm_config)
    return model


def _process(model: nn.Module, vllm_config: Any) -> None:
    """What vLLM does after loading."""
    loading: Any = import_module("vllm.model_executor.model_loader.utils")
    device = torch.device(vllm_config.device_config.device)
    loading.process_weights_after_loading(model, vllm_config.model_config, device)


def _replay(folder: Path, vllm_config: Any) -> dict[str, Any]:
    worker: Any = import_module("umbra.engines.vllm.vllm_loader")
    aliases: dict[str, str] = json.loads((folder / "aliases.json").read_text())
    model, expected = _make_model(vllm_config), _make_model(vllm_config)
    loader = worker.LayerwiseLoader(model, vllm_config.model_config)
    updates = WorkerUpdates(model, loader)
    differing: list[str] = []
    whole: list[str] = []
    for name in ("version-1", "version-2"):
        weights = load_file(folder / f"{name}.safetensors")
        _poison(model)
        source = ShardedSource(weights, aliases, rows(3), torch.bfloat16)
        updates.load_model(source)
        whole = source.whole_names
        _poison(expected)
        loads: Any = expected
        with torch.no_grad():
            loads.load_weights(ShardedSource(weights, aliases, rows(1), torch.bfloat16).tensors())
        _process(expected, vllm_config)
        differing += find_differing(model, expected)
    plan = updates.plan
    assert plan is not None
    # Layerwise reload of all layers leaves its traces; then the same weights are recorded again.
    weights = load_file(folder / "version-1.safetensors")
    source = ShardedSource(weights, aliases, rows(3), torch.bfloat16)
    loader.load(None, source.tensors())
    later = WorkerUpdates(model, loader)
    later.load_model(source)
    assert later.plan is not None
    return {
        "differing": differing,
        "num_parameters": len(list(model.parameters())),
        "num_copies": plan.num_copies,
        "num_copies_later": later.plan.num_copies,
        "reasons": _reasons(plan),
        "reasons_later": _reasons(later.plan),
        "whole": whole,
        "unread": loader.unread,
    }


def _reasons(plan: CopyPlan) -> list[str]:
    return [f"{type(layer).__name__}: {why}" for layer, why in plan.reasons.items()]


def _poison(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)


def find_differing(model: nn.Module, expected: nn.Module) -> list[str]:
    wanted = dict(expected.named_parameters())
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(_bits(parameter), _bits(wanted[name]))
    ]


def _bits(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().contiguous().reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
