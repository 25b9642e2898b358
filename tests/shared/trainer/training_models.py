"""Small random models and tokenizers for trainer tests, made from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CHARS = "0123456789abcdefghijklmnopqrstuvwxyz +-=?"
EOS, PAD = 1, 0
VOCAB_SIZE = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform logits
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def listed(tensor: Tensor) -> list[Any]:
    """`tensor.tolist()`, which torch leaves untyped."""
    values: Any = tensor
    return values.tolist()


def make_model(kind: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random model in float32, on the CPU."""
    base = _BASE | changes
    qwen3: dict[str, Any] = {"head_dim": 8, "tie_word_embeddings": True} | base
    latent: dict[str, Any] = {  # values have another size than queries
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "first_k_dense_replace": 2,  # no experts
    }
    experts: dict[str, Any] = {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    ernie = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    ernie |= {"moe_layer_start_index": 0}
    named: Any = AutoConfig
    configs: dict[str, Any] = {
        "qwen3": lambda: Qwen3Config(**qwen3),
        "qwen3-moe": lambda: Qwen3MoeConfig(**(base | experts)),
        "qwen2": lambda: Qwen2Config(**base),
        "granite": lambda: GraniteConfig(**base),
        "llama": lambda: LlamaConfig(**base),
        "deepseek-v3": lambda: DeepseekV3Config(**(base | latent | changes)),
        "minimax-m2": lambda: named.for_model("minimax_m2", **(base | experts), rotary_dim=4),
        "ernie-moe": lambda: named.for_model("ernie4_5_moe", **base, **ernie),
        "mistral-window": lambda: MistralConfig(**base, sliding_window=4),
    }
    torch.default_generator.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(configs[kind]()).eval()


def save_model(folder: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face directory: model, tokenizer and chat template."""
    make_model(kind, seed, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, chars: str = CHARS, first_id: int = 2) -> None:
    """One token a character; ids from `first_id` on."""
    vocab = {"<pad>": PAD, "<eos>": EOS} | {char: first_id + i for i, char in enumerate(chars)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
