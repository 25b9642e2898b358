"""The shape of a decoder model: rope settings are in `rope_parameters` of transformers 5, or in
`rope_theta` and `rope_scaling` of 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.engine_api.weight_files import has_own_head, untied
from umbra.runtime.errors import ConfigError, DataError

MODEL_TYPES: Final = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base wavelength and, for `llama3` and `linear`, its stretching."""

    theta: float
    kind: str  # "default" | "linear" | "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_embeddings: bool


def load_model_config(model_path: str) -> ModelConfig:
    """Reads config.json; a head that the weights have is not tied (`has_own_head`). Raises
    DataError if it is missing or unreadable, ConfigError if the architecture or an option is
    not supported."""
    path = Path(model_path)
    if not path.is_dir():
        raise DataError(
            f"model directory {model_path!r} does not exist; give a Hugging Face model directory "
            "(config.json and *.safetensors)"
        )
    try:
        raw: Any = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise DataError(f"{path} has no config.json; it is not a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path / 'config.json'} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path / 'config.json'} does not hold a JSON object")
    config = cast(dict[str, Any], raw)
    return parse_model_config(config | untied(config) if has_own_head(path, config) else config)


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    model_type = str(raw.get("model_type"))
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported by the embedded engine; allowed: "
            f"{', '.join(MODEL_TYPES)} (use the vllm or sglang engine for others)"
        )
    _refuse_unsupported(raw)
    hidden_size, num_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    num_kv_heads = _positive(raw, "num_key_value_heads", default=num_heads)
    head_dim = _positive(raw, "head_dim", default=hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"num_attention_heads={num_heads} must be a multiple of num_key_value_heads="
            f"{num_kv_heads}, and head_dim={head_dim} even"
        )
    has_bias = bool(raw.get("attention_bias", False))
    is_qwen2 = model_type == "qwen2"  # biased q, k, v, though no key sets that
    return ModelConfig(
        model_type=model_type,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        rope=_parse_rope(raw),
        has_qkv_bias=is_qwen2 or has_bias,
        has_output_bias=not is_qwen2 and has_bias,
        has_mlp_bias=model_type == "llama" and bool(raw.get("mlp_bias", False)),
        has_qk_norm=model_type == "qwen3",
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported; allowed: 'silu'")
    sliding = "sliding_attention" in (raw.get("layer_types") or ())
    if sliding or (raw.get("use_sliding_window") and raw.get("sliding_window") is not None):
        raise ConfigError(
            "sliding-window attention is not supported by the embedded engine; set "
            "use_sliding_window to false or use another engine"
        )
    if raw.get("quantization_config") is not None:
        raise ConfigError("quantised models are not supported; give the unquantised weights")


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    settings: dict[str, Any] = dict(raw.get("rope_scaling") or {})
    settings.update(raw.get("rope_parameters") or {})
    theta = settings.get("rope_theta", raw.get("rope_theta"))
    kind = str(settings.get("rope_type", settings.get("type", "default")))
    if float(settings.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1.0 is not supported")
    theta = 10_000.0 if theta is None else float(theta)
    if kind == "default":
        return RopeConfig(theta=theta, kind=kind)
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"rope type {kind!r} is not supported; allowed: default, linear, llama3 (or use "
            "another engine)"
        )
    try:
        if kind == "linear":
            return RopeConfig(theta=theta, kind=kind, factor=float(settings["factor"]))
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_max_position_embeddings=int(
                settings.get("original_max_position_embeddings")
                or _positive(raw, "max_position_embeddings")
            ),
        )
    except KeyError as error:
        raise ConfigError(f"rope type {kind!r} lacks its setting {error}") from None


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value
