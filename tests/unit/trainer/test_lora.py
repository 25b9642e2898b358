"""Adapters of linear layers: numbers of plain loops, the layers that get one, and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from minimal_config import config_with
from torch import Tensor, nn
from training_models import listed, make_model, save_model

from umbra.runtime.engine_api.lora import matrix_shapes
from umbra.runtime.errors import ConfigError
from umbra.trainer.checkpoint.model_export import write_adapters
from umbra.trainer.config.trainer_config import LoraSection, ModelSection
from umbra.trainer.model.lora_layers import (
    LoraAdapters,
    LoraEmbedding,
    LoraExperts,
    LoraLinear,
    adapted_layers,
)
from umbra.trainer.services.setup_check import check_lora

RANK, SCALE = 2, 1.5
NUM_IN, NUM_OUT, NUM_ROWS = 4, 3, 5


def product(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    columns = list(zip(*right, strict=True))
    return [[sum(a * b for a, b in zip(row, col, strict=True)) for col in columns] for row in left]


def transposed(matrix: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def close_to(expected: list[list[float]], found: Tensor, scale: float = 1.0) -> bool:
    return torch.allclose(scale * torch.tensor(expected, dtype=torch.float64), found, atol=1e-12)


def test_values_and_gradients_are_those_of_plain_loops() -> None:
    draws = torch.Generator().manual_seed(1)
    base = nn.Linear(NUM_IN, NUM_OUT, dtype=torch.float64).requires_grad_(False)
    layer = LoraLinear(base, RANK, SCALE, torch.float64)
    nn.init.normal_(layer.lora_B.weight, generator=draws)
    rows = torch.randn(NUM_ROWS, NUM_IN, dtype=torch.float64, generator=draws, requires_grad=True)
    of_output = torch.randn(NUM_ROWS, NUM_OUT, dtype=torch.float64, generator=draws)

    output = layer(rows)
    torch.autograd.backward(output, of_output)

    x, g = listed(rows.detach()), listed(of_output)
    first, second = listed(layer.lora_A.weight.detach()), listed(layer.lora_B.weight.detach())
    weight = listed(base.weight)
    changed = product(x, transposed(product(second, first)))
    plain = product(x, transposed(weight))
    bias: list[float] = listed(base.bias)
    expected = [
        [p + b + SCALE * c for p, b, c in zip(ps, bias, cs, strict=True)]
        for ps, cs in zip(plain, changed, strict=True)
    ]
    assert close_to(expected, output)
    of_first, of_second = layer.lora_A.weight.grad, layer.lora_B.weight.grad
    assert of_first is not None
    assert of_second is not None
    assert close_to(product(transposed(product(g, second)), x), of_first, SCALE)
    assert close_to(product(transposed(g), product(x, transposed(first))), of_second, SCALE)
    assert rows.grad is not None
    through = product(g, listed(base.weight + delta_of(layer)))
    assert close_to(through, rows.grad)
    assert layer.weight.grad is None


def delta_of(layer: LoraLinear) -> Tensor:
    return layer.scale * (layer.lora_B.weight @ layer.lora_A.weight).detach()


def test_an_embeddings_values_and_gradients_are_those_of_a_changed_weight() -> None:
    draws = torch.Generator().manual_seed(1)
    base = nn.Embedding(NUM_IN, NUM_OUT, dtype=torch.float64).requires_grad_(False)
    layer = LoraEmbedding(base, RANK, SCALE, torch.float64)
    first, second = layer.lora_embedding_A, layer.lora_embedding_B
    for matrix in (first, second):
        nn.init.normal_(matrix, generator=draws)
    tokens = torch.tensor([[2, 0, 2], [1, 2, 3]])
    of_output = torch.randn(2, 3, NUM_OUT, dtype=torch.float64, generator=draws)

    output = layer(tokens)
    found = torch.autograd.grad(output, (first, second), of_output)

    expected = (base.weight + SCALE * (second @ first).t())[tokens]
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (first, second), of_output))


OUTER = ("embed_tokens", "lm_head", "q_proj")


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("qwen3", LoraSection(rank=4)),
        ("qwen3", LoraSection(rank=4, rslora=True)),
        ("qwen2", LoraSection(rank=4)),  # whose projections have biases
        ("llama", LoraSection(rank=4, targets=OUTER)),
        ("qwen3-moe", LoraSection(rank=4, targets=("mlp.experts", "o_proj"))),
    ],
)
def test_a_model_with_adapters_is_one_with_changed_weights(kind: str, section: LoraSection) -> None:
    model, changed, unchanged = (make_model(kind).double() for _ in range(3))
    for each in (changed, unchanged):
        each.set_experts_implementation("eager")  # the default has no float64
    adapters = LoraAdapters(model, section, torch.float64)
    adapters.start(seed=3)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.lora_B.weight, std=0.1)
            changed.get_submodule(name).weight.data += delta_of(layer)
        elif isinstance(layer, LoraEmbedding):
            nn.init.normal_(layer.lora_embedding_A, std=0.1)
            product = layer.lora_embedding_B @ layer.lora_embedding_A
            changed.get_submodule(name).weight.data += layer.scale * product.detach().t()
        elif isinstance(layer, LoraExperts):
            change_experts(changed.get_submodule(name), layer)
    tokens = torch.arange(2, 30)[None]

    with torch.no_grad():
        logits = model(tokens).logits
        with adapters.switched_off():
            without = model(tokens).logits
        start = unchanged(tokens).logits
        expected = changed(tokens).logits

    assert torch.allclose(logits, expected, atol=1e-9)
    assert torch.equal(without, start)
    assert (logits - start).abs().max() > 0.1
    assert adapters.scale == pytest.approx(32 / (2 if section.rslora else 4))
    assert adapters.spec is None
    alone = LoraAdapters(make_model(kind), replace(section, merge=False), torch.float64).spec
    assert alone is not None
    assert alone.alpha / alone.rank == pytest.approx(adapters.scale)


def change_experts(experts: Any, layer: Any) -> None:
    parts = (experts.gate_up_proj, layer.base_layer), (experts.down_proj, layer)
    for weight, pair in parts:
        nn.init.normal_(pair.lora_B.weight, std=0.1)
        first, second = pair.lora_A.weight.detach(), pair.lora_B.weight.detach()
        for n in range(4):  # rows of A are by expert, columns of B by rank
            weight.data[n] += layer.scale * second[:, n::4] @ first[4 * n : 4 * (n + 1)]


def test_matrices_start_as_those_of_peft_and_do_not_depend_on_their_order() -> None:
    both, one = make_model(), make_model()
    LoraAdapters(both, LoraSection(rank=8), torch.float32).start(seed=5)
    LoraAdapters(one, LoraSection(rank=8, targets=("o_proj",)), torch.float32).start(seed=5)

    for name, layer in one.named_modules():
        if isinstance(layer, LoraLinear):
            assert torch.equal(layer.lora_A.weight, both.get_submodule(name).lora_A.weight)
    layers = [layer for layer in both.modules() if isinstance(layer, LoraLinear)]
    assert len({float(layer.lora_A.weight.detach()[0, 0]) for layer in layers}) == len(layers) == 14
    for layer in layers:
        bound = 1 / math.sqrt(layer.in_features)
        assert 0.9 * bound < layer.lora_A.weight.abs().max() <= bound
        assert not layer.lora_B.weight.any()
    outer = make_model("llama")
    LoraAdapters(outer, LoraSection(rank=8, targets=OUTER), torch.float32).start(seed=5)
    assert not outer.model.embed_tokens.lora_embedding_A.any()
    assert 0.8 < outer.model.embed_tokens.lora_embedding_B.std() < 1.2


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_all_linear_layers_but_the_head_have_adapters(kind: str) -> None:
    model = make_model(kind)

    every = adapted_layers(model, LoraSection(rank=1))
    some = adapted_layers(model, LoraSection(rank=1, targets=("1.self_attn.q_proj", "up_proj")))

    assert len(every) == 14
    assert "lm_head" not in every
    assert list(some) == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    ]


@pytest.mark.parametrize("target", ["proj", "norm", "q_proj."])
def test_a_target_that_matches_nothing_is_refused_before_a_start(
    target: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model")
    lora: dict[str, Any] = {"rank": 2, "targets": ["q_proj", target]}
    model = config_with(model={"path": str(folder), "lora": lora}).model

    words = f"targets: '{target}' matches none of the 16 layers of .* q_proj, k_proj"
    with pytest.raises(ConfigError, match=words):
        LoraAdapters(make_model(), model.lora, torch.float32)
    with pytest.raises(ConfigError, match=f"targets: '{target}' matches none of the 16 "):
        check_lora(model)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_one_of_two_tied_tensors_is_refused_before_a_start(
    target: str, tmp_path: Path
) -> None:
    lora: dict[str, Any] = {"rank": 2, "targets": [target]}

    def section(kind: str) -> ModelSection:
        folder = str(save_model(tmp_path / kind, kind))
        return config_with(model={"path": folder, "lora": lora}).model

    words = f"'{target}' is one tensor with the {'head' if target != 'lm_head' else 'embeddings'}"
    with pytest.raises(ConfigError, match=words):
        LoraAdapters(make_model(), section("qwen3").lora, torch.float32)
    with pytest.raises(ConfigError, match=words):
        check_lora(section("qwen3"))
    check_lora(section("llama"))


def test_experts_get_adapters_where_targets_name_them(tmp_path: Path) -> None:
    model, folder = make_model("qwen3-moe"), save_model(tmp_path / "model", "qwen3-moe")
    experts = LoraSection(rank=8, targets=("experts",))
    shapes = matrix_shapes(folder)

    for names in (
        adapted_layers(model, LoraSection(rank=8)),
        LoraSection().chosen(shapes, "", is_tied=False),
    ):
        assert len([name for name in names if ".self_attn." in name]) == 8
        assert not any("experts" in name for name in names)
    assert list(adapted_layers(model, experts)) == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert len(experts.chosen(shapes, "", is_tied=False)) == 2 * 4 * 3
    check_lora(ModelSection(path=folder, lora=experts))
    with pytest.raises(ConfigError, match="'up_proj' matches none of the 14 layers"):
        check_lora(ModelSection(path=folder, lora=LoraSection(rank=8, targets=("up_proj",))))


def test_layers_that_multiply_in_their_own_way_get_no_adapter() -> None:
    class Quantised(nn.Linear):
        pass

    model = make_model()
    for name, layer in list(model.named_modules()):
        if name.endswith("k_proj"):
            parent, _, child = name.rpartition(".")
            replacement = Quantised(layer.in_features, layer.out_features)
            setattr(model.get_submodule(parent), child, replacement)

    assert len(adapted_layers(model, LoraSection(rank=1))) == 12
    with pytest.raises(ConfigError, match="'k_proj' matches none of the 14 layers"):
        adapted_layers(model, LoraSection(rank=1, targets=("k_proj",)))
    model.model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match=r"no layer of the class nn\.Linear"):
        adapted_layers(model, LoraSection(rank=1))


def test_a_rank_that_no_weight_has_is_refused_before_a_start(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")

    check_lora(config_with("model.lora.rank=32", model_dir=folder).model)
    with pytest.raises(ConfigError, match="rank = 33 exceeds 32, the largest rank of the weights"):
        check_lora(config_with("model.lora.rank=33", model_dir=folder).model)


SNAPSHOT = "hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0"


@pytest.mark.parametrize(
    ("path", "base", "revision"),
    [("qa/model", "{here}/qa/model", None), (SNAPSHOT, "Qwen/Qwen3-0.6B", "c1899de289a0")],
    ids=["folder", "hub"],
)
def test_exported_adapters_name_a_base_that_any_folder_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, base: str, revision: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    source = ModelSection(path=Path(path), lora=LoraSection(rank=RANK))
    matrices = {f"q_proj.lora_{each}.weight": torch.ones(RANK, RANK) for each in "AB"}

    write_adapters(Path(), source, matrices, torch.float32)

    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base.format(here=tmp_path.resolve())
    assert config["revision"] == revision
