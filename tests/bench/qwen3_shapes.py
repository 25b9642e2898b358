"""Shapes of Qwen3 models that are on the hub, and a tiny one, for weights from a seed."""

from __future__ import annotations

from typing import Any

QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
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
    "0.6B": QWEN3_0_6B,
    "8B": QWEN3_8B,
}


def parameter_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all parameters, by their names in a checkpoint. Models below 8B have no lm_head."""
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    dim = shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], width),
    }
    for idx in range(shape["num_hidden_layers"]):
        shapes |= {f"model.layers.{idx}.{name}.weight": sizes for name, sizes in layer.items()}
    shapes["model.norm.weight"] = (width,)
    if width >= 4096:
        shapes["lm_head.weight"] = (shape["vocab_size"], width)
    return shapes
