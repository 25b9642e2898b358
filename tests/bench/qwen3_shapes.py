"""Shapes of Qwen3 models that are on the hub, and a tiny one, for weights from a seed."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "vocab_size")  # fmt: skip
_TABLE = {
    "tiny": (64, 128, 2, 4, 2, 32, 512),
    "135M": (576, 1536, 30, 9, 3, 64, 49152),  # SmolLM2's sizes
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936),
}
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True)) for name, sizes in _TABLE.items()
}


def qwen3_config(shape: dict[str, Any], **settings: Any) -> Any:
    """A configuration of transformers for weights in bfloat16. Models below 8B have no lm_head."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **shape,
        tie_word_embeddings=shape["hidden_size"] < 4096,
        max_position_embeddings=4096,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        **settings,
    )


def make_model(shape: dict[str, Any], device: Any, **settings: Any) -> Any:
    """A model with weights from a seed."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(qwen3_config(shape, **settings))


def save_model(folder: Path, shape: dict[str, Any], dtype: str, **settings: Any) -> Any:
    """Writes a model, made on a GPU if there is one; returns it."""
    import torch

    model = make_model(shape, "cuda" if torch.cuda.is_available() else "cpu", **settings)
    model.to(getattr(torch, dtype)).cpu().save_pretrained(folder)
    return model


def parameter_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by its name in a checkpoint."""
    model = make_model(shape, "meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
