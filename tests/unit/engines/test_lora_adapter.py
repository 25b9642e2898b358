"""LoRA adapters in folders and in syncs."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_factory import read_adapter, save_adapter, write_adapter
from safetensors.torch import load_file
from torch import Tensor, ones

from umbra.runtime.engine_api.lora import LoraBase, LoraSpec, Shapes, read_adapter_rank
from umbra.runtime.errors import ConfigError, DataError, WeightSyncError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.shards import wire_manifest

Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
LATER = "base_model.model.model.layers.7.self_attn.q_proj.lora_"


def change(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor | None] | None
) -> Path:
    """An adapter of rank 4 with something wrong.

    Args:
        tensors: new values, None for one that is to go; None instead of all where all are.
    """
    save_adapter(folder, "qwen3", seed=1)
    said = json.loads((folder / "adapter_config.json").read_text())
    held = load_file(folder / "adapter_model.safetensors")
    changed = {} if tensors is None else held | dict(tensors)
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    write_adapter(folder, said | dict(config), kept)
    return folder


def test_an_adapter_of_the_model_is_read(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "a", "qwen3", seed=1, rank=6)

    assert read_adapter_rank("a", path, model_folder("qwen3")) == 6


def test_ranks_may_differ_if_the_adapter_allows_it(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    larger = {f"{Q_PROJ}.lora_A.weight": ones(9, 48), f"{Q_PROJ}.lora_B.weight": ones(128, 9)}
    pattern = {"rank_pattern": {"layers.1.self_attn.q_proj": 9}}

    path = change(tmp_path / "a", pattern, larger)

    assert read_adapter_rank("a", path, model_folder("qwen3")) == 9
    change(tmp_path / "a", {}, larger)
    with pytest.raises(DataError, match=r"has r 4, its matrices \[4, 9\]"):
        read_adapter_rank("a", path, model_folder("qwen3"))


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3', not 'LORA'"),
        ({"r": 8}, {}, r"has r 8, its matrices \[4\]"),
        ({"r": [4]}, {}, r"has r \[4\], its matrices \[4\]"),
        ({}, None, "holds no lora_A and lora_B"),
        ({}, {f"{Q_PROJ}.lora_B.weight": None}, "lora_B is not there"),
        (
            {},
            {f"{LATER}A.weight": ones(4, 48), f"{LATER}B.weight": ones(8, 4)},
            r"the model has no model\.layers\.7\.self_attn\.q_proj",
        ),
    ],
)
def test_a_wrong_adapter_is_named_with_what_is_wrong(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor | None] | None,
    text: str,
) -> None:
    path = change(tmp_path / "a", config, tensors)

    with pytest.raises(DataError, match=rf"LoRA adapter 'a': .*{text}"):
        read_adapter_rank("a", path, model_folder("qwen3"))


def test_an_adapter_of_another_size_of_model_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "a", "qwen3-wide", seed=1)

    with pytest.raises(DataError, match=r"is \(48, 80\) in the model and \(256, 512\) in the"):
        read_adapter_rank("a", path, model_folder("qwen3"))


def test_a_folder_that_is_none_of_an_adapter_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        read_adapter_rank("a", tmp_path / "nowhere", model_folder("qwen3"))

    path = save_adapter(tmp_path / "a", "qwen3", seed=1)
    (path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="is no safetensors file"):
        read_adapter_rank("a", path, model_folder("qwen3"))
    (path / "adapter_model.safetensors").write_bytes(b"\x07" + bytes(7) + b'{"w":1}')
    with pytest.raises(DataError, match="is no safetensors file"):
        read_adapter_rank("a", path, model_folder("qwen3"))


PAIR = {f"{Q_PROJ}.lora_A.weight": (4, 48), f"{Q_PROJ}.lora_B.weight": (128, 4)}
SPEC = LoraSpec(rank=4, alpha=8.0)


def test_a_manifest_says_that_its_tensors_are_an_adapter() -> None:
    tensors = {name: torch.zeros(shape) for name, shape in PAIR.items()}

    manifest = wire_manifest(tensors, torch.bfloat16, lora=SPEC)

    assert (manifest.lora, manifest.shapes) == (SPEC, PAIR)
    assert Manifest.from_wire(manifest.to_wire()) == manifest
    assert wire_manifest(tensors).lora is None


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({}, "at least one pair"),
        ({f"{Q_PROJ}.lora_A.weight": (4, 48)}, "its lora_B is not there"),
        ({f"{Q_PROJ}.lora_B.weight": (128, 4)}, "lora_B.weight' is no matrix of a LoRA adapter"),
        (
            PAIR | {f"{Q_PROJ}.lora_B.weight": (128, 5)},
            r"shape \(4, 48\), and its lora_B \(128, 5\)",
        ),
        (PAIR | {"model.norm.weight": (48,)}, "'model.norm.weight' is no matrix"),
        ({name.removeprefix("base_model."): shape for name, shape in PAIR.items()}, "is no matrix"),
        ({"a.lora_A.default.weight": (4, 48), "a.lora_B.default.weight": (128, 4)}, "is no matrix"),
        (
            {f"{Q_PROJ}.lora_A.weight": (6, 48), f"{Q_PROJ}.lora_B.weight": (128, 6)},
            "have rank 6, and the adapter's rank is 4",
        ),
    ],
)
def test_tensors_that_are_no_adapter_are_refused_before_a_sync(shapes: Shapes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Manifest.layout(((name, "float32", shape) for name, shape in shapes.items()), lora=SPEC)


def test_a_model_has_adapters_of_its_modules_up_to_a_rank(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = LoraBase(model_folder("qwen3"), 4)
    tensors, spec = read_adapter(save_adapter(tmp_path, "qwen3", seed=1, rank=4))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    base.check(spec, shapes)

    with pytest.raises(WeightSyncError, match=r"has rank 8, .* started with lora_rank = 4"):
        base.check(LoraSpec(rank=8, alpha=8.0), shapes)
    with pytest.raises(WeightSyncError, match="brings weights of the model"):
        base.check(None, {"model.norm.weight": (48,)})
    with pytest.raises(WeightSyncError, match=r"is \(128, 48\) in the model and \(81, 48\)"):
        base.check(spec, {f"{Q_PROJ}.lora_A.weight": (4, 48), f"{Q_PROJ}.lora_B.weight": (81, 4)})


def test_a_pool_gives_its_engines_the_rank_or_lets_them_serve_their_own_weights() -> None:
    (engine,) = PoolSpec(name="policy", engine="vllm", count=1, lora_rank=8).engine_specs()

    assert engine.kwargs == {"lora_rank": 8}
    with pytest.raises(ConfigError, match="lora_rank = 8 and load_weights exclude each other"):
        PoolSpec(name="policy", engine="vllm", count=1, lora_rank=8, load_weights=True)
