"""Shapes of Qwen3 models that are on the hub, and a tiny one, for weights from a seed."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

_HEADS_OF_128 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "135M": {  # SmolLM2's sizes
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "0.6B": {
        **_HEADS_OF_128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "8B": {
        **_HEADS_OF_128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
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


def save_model(folder: Path, shape: dict[str, Any], dtype: str, **settings: Any) -> Any:
    """Writes a model with weights from a seed, made on a GPU if there is one; returns it."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen3ForCausalLM(qwen3_config(shape, **settings))
    model.to(getattr(torch, dtype)).cpu().save_pretrained(folder)
    return model


def parameter_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by its name in a checkpoint."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(qwen3_config(shape))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
