from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbra.runtime.errors import ConfigError


def kv_token_nbytes(
    config: Mapping[str, Any], itemsize: int, *, tensor_parallel_size: int = 1
) -> int:
    """Bytes of one token's keys and values in all layers, for one worker's heads, at least one.
    With latent attention (DeepSeek-V2, arXiv:2405.04434) all workers have the same latent vector
    and rotary key."""
    try:
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
        num_layers = int(config["num_hidden_layers"])
        if config.get("kv_lora_rank"):
            latent_size = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
            return num_layers * latent_size * itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's config.json does not give the size of its KV cache ({error!r})"
        ) from None
    num_kv_heads = max(1, num_kv_heads // tensor_parallel_size)
    return 2 * num_layers * num_kv_heads * head_dim * itemsize
