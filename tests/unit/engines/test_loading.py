"""Checkpoints into parameters: bit for bit, and errors that name the tensor."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_runs import load_model
from model_factory import KINDS, make_model, save_model
from safetensors.torch import load_file, save_file

from umbra.engines.embedded.embedded_worker import load_checkpoint, parse_dtype
from umbra.engines.embedded.parameters import Parameters
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
