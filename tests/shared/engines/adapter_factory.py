"""Small random LoRA adapters in PEFT's format, made from a seed, and models with one merged in."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from model_factory import make_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from umbra.runtime.engine_api.lora import EMBEDDING, LINEAR, LoraSpec

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def save_adapter(
    folder: Path,
    kind: str = "qwen3",
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL_LINEAR,
    **changes: Any,
) -> Path:
    """An adapter for the models of one kind, as strong as the weights themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, parameter in make_model(kind).named_parameters():
        module = name.removesuffix(".weight")
        if "experts" in targets and parameter.ndim == 3:
            num, num_out, num_in = parameter.shape
            module = _stack_of(name)
            first = torch.randn(num * rank, num_in, generator=draws) * 0.1
            tensors[f"{_PREFIX}{module}{LINEAR[0]}"] = first
            second = torch.randn(num_out, rank * num, generator=draws) * 0.3
            tensors[f"{_PREFIX}{module}{LINEAR[1]}"] = second
        elif module.rpartition(".")[2] in targets:
            is_embedding = module.endswith("embed_tokens")
            num_out, num_in = reversed(parameter.shape) if is_embedding else parameter.shape
            names = EMBEDDING if is_embedding else LINEAR
            first = torch.randn(rank, num_in, generator=draws) * 0.1
            tensors[f"{_PREFIX}{module}{names[0]}"] = first
            second = torch.randn(num_out, rank, generator=draws) * 0.3
            tensors[f"{_PREFIX}{module}{names[1]}"] = second
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
    }
    write_adapter(folder, config | changes, tensors)
    return folder


def _stack_of(parameter: str) -> str:
    """PEFT's module for a parameter of experts."""
    experts, _, part = parameter.rpartition(".")
    return f"{experts}.base_layer" if part == "gate_up_proj" else experts


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], LoraSpec]:
    """Its matrices as a trainer has them, to publish them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    spec = LoraSpec(rank=config["r"], alpha=config["lora_alpha"])
    return load_file(folder / "adapter_model.safetensors"), spec


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")


def merged_model(kind: str, model_seed: int, adapter: Path | None) -> PreTrainedModel:
    """W + alpha / r * B @ A, for every matrix that the adapter has."""
    model = make_model(kind, model_seed)
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    scale = config["lora_alpha"] / config["r"]
    with torch.no_grad():
        for name, weight in parameters.items():
            first = tensors.get(f"{_PREFIX}{_stack_of(name)}{LINEAR[0]}")
            if weight.ndim == 3 and first is not None:
                second, num = tensors[f"{_PREFIX}{_stack_of(name)}{LINEAR[1]}"], len(weight)
                for n, part in enumerate(first.chunk(num)):
                    weight[n] += scale * second[:, n::num] @ part
        for name, first in tensors.items():
            if ".experts." in name:
                continue
            for ends in (LINEAR, EMBEDDING):
                if name.endswith(ends[0]):
                    module = name.removesuffix(ends[0])
                    change = scale * tensors[module + ends[1]] @ first
                    weight = parameters[f"{module.removeprefix(_PREFIX)}.weight"]
                    weight += change if ends is LINEAR else change.t()
    return model
