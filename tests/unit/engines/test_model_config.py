"""config.json as transformers 4 and 5 write it, and what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from umbra.runtime.engine_api.decoder_config import load_model_config, parse_model_config
from umbra.runtime.errors import ConfigError, DataError

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_absent_keys_have_the_family_s_defaults() -> None:
    config = parse_model_config(RAW)

    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope.theta, config.rope.kind) == (10_000.0, "default")
    assert not config.has_qkv_bias
    assert not config.has_tied_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
)
def test_the_rope_base_is_found_where_either_version_writes_it(rope: dict[str, Any]) -> None:
    assert parse_model_config(RAW | rope).rope.theta == 5e5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    ],
)
def test_llama3_scaling_falls_back_on_the_trained_context(rope: dict[str, Any]) -> None:
    config = parse_model_config(RAW | rope)

    assert config.rope.kind == "llama3"
    assert config.rope.theta == 5e5
    assert config.rope.original_max_position_embeddings == 256


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported.*llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks.*low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_model_config(RAW | change)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*does not exist"):
        load_model_config(str(tmp_path / "nowhere"))


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(DataError, match=r"config\.json"):
        load_model_config(str(tmp_path))


def test_a_config_is_read_from_disk(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))

    assert load_model_config(str(tmp_path)) == parse_model_config(RAW)
