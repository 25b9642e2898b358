"""The sizes of a decoder, from config.json and the headers of its weights: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from umbra.runtime.engine_api.weight_files import has_own_head
from umbra.runtime.errors import ConfigError
from umbra.runtime.text.model_files import read_model_config
from umbra.trainer.model.stored_weights import StoredWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    num_parameters: int  # tied embeddings count once
    stored_nbytes: int  # of the weights' files
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of the MLP; in a mixture of experts, of those that a token uses
    q_size: int  # heads times head size, of queries
    kv_size: int  # the same of keys
    vocab_size: int
    has_qk_norm: bool  # queries and keys have norms of their own
    is_tied: bool  # embeddings and head are one tensor
    is_quantised: bool  # in the files
    config: dict[str, Any]  # config.json, or its text part

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises DataError without readable safetensors, ConfigError if
        config.json lacks a size."""
        whole = config = read_model_config(folder)
        if isinstance(config.get("text_config"), dict):
            config = cast("dict[str, Any]", config["text_config"])
        weights = StoredWeights(folder)
        is_tied = bool(config.get("tie_word_embeddings")) and not has_own_head(folder, whole)
        try:
            num_heads = int(config["num_attention_heads"])
            hidden_size, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
            head_dim = int(config.get("head_dim") or hidden_size // num_heads)
            is_repeated = is_tied and "lm_head.weight" in weights.names
            return cls(
                num_parameters=weights.num_elements - is_repeated * vocab_size * hidden_size,
                stored_nbytes=weights.nbytes,
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden_size,
                intermediate_size=_intermediate_size(config),
                q_size=num_heads * head_dim,
                kv_size=int(config.get("num_key_value_heads") or num_heads) * head_dim,
                vocab_size=vocab_size,
                has_qk_norm=any(".q_norm." in name for name in weights.names),
                is_tied=is_tied,
                is_quantised="quantization_config" in whole or "quantization_config" in config,
                config=config,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}/config.json does not give {error}") from None

    @property
    def embedding_size(self) -> int:
        """Elements of the embeddings and the head."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    @property
    def layer_size(self) -> int:
        """Elements of one decoder layer."""
        return max(0, self.num_parameters - self.embedding_size) // self.num_layers


def _intermediate_size(config: dict[str, Any]) -> int:
    num_experts = config.get("num_experts_per_tok")
    if num_experts and config.get("moe_intermediate_size"):
        return int(num_experts) * int(config["moe_intermediate_size"])
    return int(config["intermediate_size"])
