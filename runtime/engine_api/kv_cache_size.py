"""The size of a model's keys and values, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbra.runtime.errors import ConfigError


def kv_token_nbytes(
    config: Mapping[str, Any], itemsize: int, *, tensor_parallel_size: int = 1
) -> int:
    """Bytes of one token's keys and values in all layers, for one worker's heads.

    Each worker has its share of the heads, but at least one.

    Args:
        config: of the model; of one with several parts, that of the text part.
        itemsize: bytes of one element.

    Raises:
        ConfigError: the config lacks the sizes.
    """
    try:
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
        num_layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's config.json does not give the size of its KV cache ({error!r})"
        ) from None
    num_kv_heads = max(1, num_kv_heads // tensor_parallel_size)
    return 2 * num_layers * num_kv_heads * head_dim * itemsize
