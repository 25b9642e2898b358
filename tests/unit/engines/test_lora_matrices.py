"""Matrices of LoRA adapters that a sync brings: what makes an adapter, and which model it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_factory import read_adapter, save_adapter

from umbra.runtime.engine_api.lora import LoraBase, LoraSpec, Shapes
from umbra.runtime.errors import ConfigError, WeightSyncError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.shards import wire_manifest

Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
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
