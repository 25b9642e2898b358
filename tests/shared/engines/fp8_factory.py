"""Small seeded checkpoints of Qwen3 in FP8, with scales as Qwen3-FP8 has them or per tensor."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import torch
from model_factory import make_model
from safetensors.torch import save_file
from torch import Tensor

Scheme = Literal["blocks", "tensors", "none"]
"""What has a scale of its own: blocks of 128 x 128, or tensors; none: a checkpoint in bfloat16."""
KIND: Final = "qwen3-wide"  # its linear layers are whole blocks
BLOCK: Final = 128
_DTYPE: Final = torch.float8_e4m3fn
_SMALLEST_SCALE: Final = 1e-12


def save_checkpoint(folder: Path, scheme: Scheme, seed: int) -> Path:
    """Linear layers in FP8, with scales in float32; embeddings and norms in bfloat16."""
    model = make_model(KIND, seed)
    folder.mkdir()
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if scheme != "none":
        config["quantization_config"] = _quantization_config(scheme)
    path.write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if scheme == "none" or not name.endswith("_proj.weight"):
            tensors[name] = parameter.detach().to(torch.bfloat16)
        elif scheme == "blocks":
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(parameter.detach(), BLOCK)
        else:
            codes, scales = quantise(parameter.detach(), max(parameter.shape))
            tensors[name], tensors[f"{name}_scale"] = codes, scales.reshape(())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def quantise(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes, and for each block [row, column] the scale by which to multiply them."""
    grid: list[tuple[Tensor, ...]] = [rows.split(block, 1) for rows in weight.split(block)]
    scales = torch.tensor([[float(part.abs().max()) for part in parts] for parts in grid])
    scales = (scales / torch.finfo(_DTYPE).max).clamp(min=_SMALLEST_SCALE)
    return (weight / _spread(scales, block, weight)).to(_DTYPE), scales


def _spread(scales: Tensor, block: int, weight: Tensor) -> Tensor:
    """The scale of each element."""
    rows, columns = weight.shape
    return scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]


def _quantization_config(scheme: Scheme) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
    }
    return config | ({"weight_block_size": [BLOCK, BLOCK]} if scheme == "blocks" else {})
