"""The embedded engine's model: its config, and its parameters from a checkpoint."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import load_model
from model_factory import KINDS, make_model, save_model
from safetensors.torch import load_file, save_file

from umbra.engines.embedded.embedded_worker import load_checkpoint, parse_dtype
from umbra.engines.embedded.parameters import Parameters
from umbra.runtime.engine_api.decoder_config import load_model_config, parse_model_config
from umbra.runtime.errors import ConfigError, DataError


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the tensors of a saved model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_equal_the_checkpoint_bit_for_bit(
    model_folder: Callable[[str], Path], kind: str
) -> None:
    expected = make_model(kind).state_dict()

    parameters = load_model(model_folder(kind)).parameters

    named = parameters.destinations | {
        alias: parameters.destinations[name] for alias, name in parameters.aliases.items()
    }
    assert named.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(named[name], tensor), name
        assert named[name].is_contiguous()


def test_destinations_are_where_the_forward_pass_reads(
    model_folder: Callable[[str], Path],
) -> None:
    parameters = load_model(model_folder("qwen3")).parameters
    k_proj = parameters.destinations["model.layers.1.self_attn.k_proj.weight"]
    k_norm = parameters.destinations["model.layers.1.self_attn.k_norm.weight"]
    layer = parameters.layers[1]
    assert layer.qk_norm is not None

    k_proj.fill_(3.0)
    k_norm.fill_(4.0)
    parameters.refresh()

    num_query_rows = 4 * 32
    assert (layer.qkv[num_query_rows : num_query_rows + 2 * 32] == 3.0).all()
    assert (layer.qk_norm[4:] == 4.0).all()
    assert not (layer.qkv[:num_query_rows] == 3.0).any()


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    parameters = load_model(tmp_path).parameters

    for name, tensor in model.state_dict().items():
        target = parameters.destinations[parameters.aliases.get(name, name)]
        assert torch.equal(target, tensor), name


def test_a_bfloat16_checkpoint_widens_exactly(tmp_path: Path) -> None:
    model = make_model("llama").bfloat16()
    model.save_pretrained(tmp_path)

    parameters = load_model(tmp_path, "float64").parameters

    norm = model.state_dict()["model.norm.weight"]
    assert torch.equal(parameters.final_norm, norm.double())


def test_a_tied_matrix_may_be_stored_under_the_name_of_the_head(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    edit(tmp_path, rename)

    parameters = load_model(tmp_path).parameters

    assert torch.equal(parameters.embedding, model.state_dict()["model.embed_tokens.weight"])


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_stranger(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.stranger.weight"] = torch.zeros(1)


def cut_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(7)


def quantise_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop_norm, r"lacks 1 tensors.*model\.norm\.weight"),
        (add_stranger, r"'model\.stranger\.weight', which this architecture does not have"),
        (cut_norm, r"'model\.norm\.weight' has shape \(7,\).*\(48,\)"),
        (quantise_norm, r"'model\.norm\.weight' has dtype torch\.int8"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], text: str
) -> None:
    save_model(tmp_path, "qwen3")
    edit(tmp_path, change)

    with pytest.raises(DataError, match=text):
        load_model(tmp_path)


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")

    def leave_over(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path, leave_over)

    load_model(tmp_path)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="'float16' is not supported; allowed: float32"):
        parse_dtype("float16")


def test_released_parameters_keep_their_addresses(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    parameters: Parameters = load_model(folder).parameters
    before = {name: tensor.clone() for name, tensor in parameters.destinations.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in parameters.destinations.items()}

    parameters.release()
    parameters.restore()

    assert all((tensor == 0).all() for tensor in parameters.destinations.values())
    load_checkpoint(str(folder), parameters)
    assert {n: t.data_ptr() for n, t in parameters.destinations.items()} == addresses
    assert all(torch.equal(t, before[n]) for n, t in parameters.destinations.items())


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
