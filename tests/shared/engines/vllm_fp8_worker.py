"""vLLM's own models in FP8 in one worker, without an engine around them or a kernel for FP8.

python vllm_fp8_worker.py STORE QUANTIZATION FOLDER FOLDER     a file to meet at, "" or "fp8"

vLLM reads the first folder. Then umbra loads the weights of the second, of the first, and of the
second again, weights that lack a tensor, and those of the first again. Prints as JSON which
parameters differ from those of a model that vLLM reads from the folder, and how umbra refuses.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from sharded_source import ShardedSource, rows
from torch import Tensor, nn
from vllm_replay_worker import configure, find_differing, is_cpu, join, keep_unpacked

from umbra.engines.loading.worker_updates import WorkerUpdates
from umbra.runtime.errors import WeightSyncError

_KERNELS: Final = "vllm.model_executor.kernels.linear"
_LEFT_OUT: Final = ".0.mlp.down_proj.weight"  # and its scale


def main(store: str, quantization: str, folders: list[str]) -> None:
    if is_cpu():
        keep_unpacked()
        _take_kernels_of_gpus()
        torch.accelerator.empty_cache = lambda: None  # vLLM (0.32) calls it, and there is none
    vllm_config = configure(folders[0], quantization=quantization or None)
    set_config: Any = import_module("vllm.config").set_current_vllm_config
    with set_config(vllm_config):
        join(0, 1, store)
        model = _read(vllm_config)
    expected: dict[str, nn.Module] = {}
    for folder in folders:
        of_folder = configure(folder, quantization=quantization or None)
        with set_config(of_folder):
            expected[folder] = _read(of_folder)
    with set_config(vllm_config):
        print(json.dumps(_report(model, vllm_config.model_config, expected)), flush=True)
    torch.distributed.destroy_process_group()


def _report(
    model: nn.Module, model_config: Any, expected: dict[str, nn.Module]
) -> dict[str, object]:
    worker: Any = import_module("umbra.engines.vllm.vllm_loader")
    loader = worker.LayerwiseLoader(model, model_config)
    updates = WorkerUpdates(model, loader)
    unread: list[str] = []
    first, second = expected
    differing: list[list[str]] = []
    ways: list[str] = []

    def load(folder: str) -> None:
        ways.append(updates.load_model(_source(folder)))
        unread.extend(loader.unread)
        differing.append(find_differing(model, expected[folder]))

    for folder in (second, first, second):
        load(folder)
    refusal = _refusal(updates, first)
    load(first)
    return {
        "differing": differing,
        "num_told_apart": len(find_differing(expected[first], expected[second])),
        "num_parameters": len(list(model.parameters())),
        "refusal": refusal,
        "unread": unread,
        "ways": ways,
    }


def _refusal(updates: WorkerUpdates, folder: str) -> str:
    try:
        updates.load_model(_source(folder, without=_LEFT_OUT))
    except WeightSyncError as error:
        return str(error)
    return ""


def _source(folder: str, without: str | None = None) -> ShardedSource:
    tensors = load_file(Path(folder) / "model.safetensors")
    if without is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if without not in name}
    return ShardedSource(tensors, cut=rows(3))


def _read(vllm_config: Any) -> nn.Module:
    model: nn.Module = import_module("vllm.model_executor.model_loader").get_model(
        vllm_config=vllm_config
    )
    return model


def _take_kernels_of_gpus() -> None:
    """vLLM then makes of weights what the kernels for an H100 take. They are never called."""
    kernels: Any = import_module(_KERNELS)
    cutlass: Any = import_module(f"{_KERNELS}.scaled_mm.cutlass")
    for table, kernel in (
        (kernels._POSSIBLE_FP8_BLOCK_KERNELS, cutlass.CutlassFp8BlockScaledMMKernel),
        (kernels._POSSIBLE_FP8_KERNELS, cutlass.CutlassFP8ScaledMMLinearKernel),
    ):
        kernel.is_supported = _is_supported
        table.update({platform: [kernel] for platform in table})
    operations: Any = import_module("vllm._custom_ops")
    operations.scaled_fp8_quant = _quantise


def _is_supported(compute_capability: int | None = None) -> tuple[bool, str | None]:
    return True, None


def _quantise(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Takes the place of vLLM's kernel."""
    codes = torch.float8_e4m3fn
    if scale is None:
        scale = (weight.float().abs().max() / torch.finfo(codes).max).reshape(1)
    return (weight.float() / scale).to(codes), scale


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
