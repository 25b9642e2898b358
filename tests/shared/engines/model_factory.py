"""Small random models for engine tests, made from a seed with transformers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # logits far from uniform
    "bos_token_id": None,
    "eos_token_id": None,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of one of the shapes that tests go through, in float32."""
    torch.manual_seed(seed)
    match kind:
        case "qwen3":
            config = Qwen3Config(**BASE, head_dim=32, tie_word_embeddings=True)
            model = Qwen3ForCausalLM(config)
        case "qwen3-wide" | "qwen3-wide-512":  # sizes for which GPU kernels are made
            wide: dict[str, Any] = BASE | {
                "vocab_size": 97 if kind == "qwen3-wide" else 512,
                "hidden_size": 256,
                "intermediate_size": 512,
                "initializer_range": 0.065,
            }
            model = Qwen3ForCausalLM(Qwen3Config(**wide, head_dim=128, tie_word_embeddings=True))
        case "qwen3-moe-wide":
            sizes: dict[str, Any] = BASE | {
                "vocab_size": 512,
                "hidden_size": 256,
                "initializer_range": 0.065,
                "head_dim": 128,
            }
            experts = Qwen3MoeConfig(
                **sizes,
                moe_intermediate_size=256,
                num_experts=4,
                num_experts_per_tok=2,
            )
            model = Qwen3MoeForCausalLM(experts)
        case "qwen3-untied":
            model = Qwen3ForCausalLM(Qwen3Config(**BASE, head_dim=32, tie_word_embeddings=False))
        case "qwen3-untied-bias":
            no_groups: dict[str, Any] = BASE | {"num_key_value_heads": 4}
            config = Qwen3Config(**no_groups, head_dim=8, attention_bias=True)
            model = Qwen3ForCausalLM(config)
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**BASE, tie_word_embeddings=True))
        case "llama3-rope-bias":
            config = LlamaConfig(
                **BASE, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True
            )
            model = LlamaForCausalLM(config)
        case "llama-linear-rope":
            rope = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
            model = LlamaForCausalLM(LlamaConfig(**BASE, rope_parameters=rope))
        case "phi3-longrope":  # of 512 positions, of which 64 are original
            num = 16
            longrope: dict[str, Any] = {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * num,
                "long_factor": [1.5 + 0.5 * idx for idx in range(num)],
            }
            shape: dict[str, Any] = BASE | {"hidden_size": 128, "initializer_range": 0.08}
            config = Phi3Config(
                **shape,
                pad_token_id=0,
                sliding_window=None,
                original_max_position_embeddings=64,
                rope_parameters=longrope,
            )
            model = Phi3ForCausalLM(config)
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**BASE))
        case _:
            raise ValueError(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


KINDS = (
    "qwen3",
    "qwen3-untied-bias",
    "llama",
    "llama3-rope-bias",
    "llama-linear-rope",
    "qwen2",
)


def save_model(folder: Path, kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Makes a model and saves it as a Hugging Face directory."""
    model = make_model(kind, seed)
    model.save_pretrained(folder, **options)
    return model
