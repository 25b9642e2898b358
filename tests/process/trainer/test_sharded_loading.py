"""Each rank reads its own part of the weights, and gets the same bits as from transformers."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading_programs import compare_loading, score_beside
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from training_models import make_model, save_model, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from umbra.runtime.errors import DataError
from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.trainer.checkpoint.model_export import write_whole_model
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.model_loading import prepare_causal_lm
from umbra.trainer.model.stored_weights import StoredWeights

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_in_shards(folder: Path, kind: str, **changes: Any) -> Path:
    """In bfloat16, over several files with an index."""
    model = make_model(kind, **changes).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    save_tokenizer(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    safetensors: Any = importlib.import_module("safetensors.torch")
    weights = safetensors.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_head(weights: dict[str, torch.Tensor]) -> None:
    weights[HEAD] = torch.randn_like(weights[EMBEDDINGS]) * 0.2


def loading_cases(tmp_path: Path) -> list[list[str]]:
    tied = str(save_model(tmp_path / "tied"))
    untied, copied = save_model(tmp_path / "untied"), save_model(tmp_path / "copied")
    change_weights(untied, add_head)
    change_weights(copied, lambda weights: weights.update({HEAD: weights[EMBEDDINGS].clone()}))
    sharded = str(save_in_shards(tmp_path / "sharded", "llama"))
    # 65 rows, and 3 heads of 8, do not divide by two: the last shard is padded
    odd: dict[str, Any] = {"vocab_size": 65, "hidden_size": 24, "num_attention_heads": 3}
    uneven = str(save_in_shards(tmp_path / "uneven", "qwen2", num_key_value_heads=3, **odd))
    return [
        [tied, "float32", "root"],
        [tied, "float64", "layer"],
        [sharded, "float32", "layer"],
        [sharded, "bfloat16", "root"],
        [uneven, "float32", "layer"],
        [str(untied), "float32", "root"],
        [str(copied), "float32", "layer"],
    ]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shards_are_read_bit_for_bit(
    umbra_distributed_world: DistributedWorld, tmp_path: Path, num_ranks: int
) -> None:
    cases = loading_cases(tmp_path)

    outcomes = umbra_distributed_world(compare_loading, cases, num_ranks=num_ranks, timeout_s=120.0)

    for rank in outcomes:
        for case, outcome in zip(cases, rank, strict=True):
            assert outcome.pop("tensors") > 20
            assert outcome == {
                "sharded": True,
                "unequal": [],
                "unequal_buffers": [],
                "same_logprobs": True,
            }, case


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_shards_are_read_to_gpus_bit_for_bit(
    umbra_distributed_world: DistributedWorld, tmp_path: Path
) -> None:
    num_ranks = min(2, torch.cuda.device_count())

    outcomes = umbra_distributed_world(
        compare_loading,
        loading_cases(tmp_path)[:4],
        "cuda",
        num_ranks=num_ranks,
        backend="cpu:gloo,cuda:nccl",
        timeout_s=200.0,
    )

    for rank in outcomes:
        for outcome in rank:
            assert outcome["sharded"]
            assert outcome["unequal"] == outcome["unequal_buffers"] == []


@pytest.mark.slow
@pytest.mark.process
def test_a_policy_has_the_rotary_frequencies_of_the_longest_context(
    umbra_distributed_world: DistributedWorld, tmp_path: Path
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 6.0],
    }
    folder = str(save_model(tmp_path, "llama", rope_parameters=rope))

    cases: list[Any] = [[64, []], [64, [60]], [32, []]]

    ((alone, beside, short),) = umbra_distributed_world(score_beside, folder, cases, num_ranks=1)

    assert beside == pytest.approx(alone, abs=1e-5)
    assert short != pytest.approx(alone, abs=1e-2)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("wrap", ["root", "layer"])
def test_a_policy_takes_the_logits_of_a_model_that_changes_them(
    umbra_distributed_world: DistributedWorld, tmp_path: Path, wrap: str
) -> None:
    folder = save_model(tmp_path, "granite", logits_scaling=0.25)
    cases: list[Any] = [[64, []]]

    outcomes = umbra_distributed_world(score_beside, str(folder), cases, wrap, num_ranks=2)

    tokens = torch.as_tensor(np.random.default_rng(0).integers(3, 60, 10))
    auto: Any = AutoModelForCausalLM
    with torch.no_grad():
        every = auto.from_pretrained(folder).eval()(tokens[None]).logits[0].log_softmax(-1)
    expected = every[3:-1].gather(1, tokens[4:, None])[:, 0].tolist()
    for (scores,) in outcomes:
        assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_parameters_take_no_memory_before_they_are_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)

    assert {parameter.device.type for parameter in prepared.model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in prepared.model.buffers()} == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize("kind", ["minimax-m2", "ernie-moe"])
def test_biases_that_choose_experts_are_buffers_and_keep_their_precision(
    tmp_path: Path, kind: str, is_converted: bool, dtype: torch.dtype
) -> None:
    model = make_model(kind)
    expected = biases(model)
    for bias in expected.values():
        torch.nn.init.normal_(bias, std=3.0)
    model.save_pretrained(tmp_path, save_original_format=is_converted)

    prepared = prepare_causal_lm(ModelSection(path=tmp_path), dtype)

    found = biases(prepared.model)
    assert (prepared.weights is None) == is_converted
    if prepared.weights is not None:
        prepared.weights.fill(found)
    assert {each.dtype for each in prepared.model.parameters()} == {dtype}  # as FSDP needs
    assert len(found) == 2
    for name, bias in found.items():
        assert not isinstance(bias, torch.nn.Parameter)
        assert bias.dtype == torch.float32
        assert torch.equal(bias, expected[name])


@pytest.mark.slow
def test_a_language_model_loads_from_the_files_of_one_that_also_sees(tmp_path: Path) -> None:
    text = {
        **{"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32},
        **{"num_hidden_layers": 2, "num_local_experts": 2, "pad_token_id": 0},
    }
    named: Any = AutoConfig
    auto: Any = AutoModelForCausalLM
    config = named.for_model("llama4", text_config=text)
    expected = auto.from_config(config).state_dict()
    config.save_pretrained(tmp_path)
    stored = {f"language_model.{name}": each for name, each in expected.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found = prepare_causal_lm(ModelSection(path=tmp_path), torch.float32).model.state_dict()

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if "e_score_correction_bias" in name}


@pytest.mark.slow
def test_generation_settings_are_kept(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.3}))

    prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)

    model: Any = prepared.model
    assert model.generation_config.temperature == 0.3


@pytest.mark.slow
def test_what_needs_conversion_is_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path)  # names without "model." are those of the model without head

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    change_weights(folder, rename)

    prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)

    assert prepared.weights is None
    assert "every rank loads all weights" in caplog.text
    for name, parameter in make_model().named_parameters():
        assert torch.equal(prepared.model.get_parameter(name), parameter), name


@pytest.mark.slow
def test_weights_of_other_shapes_than_the_config_has_are_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 70}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(
        DataError, match=r"embed_tokens.weight has the shape \[64, 32\].*\[70, 32\]"
    ):
        prepare_causal_lm(ModelSection(path=tmp_path), torch.float32)


@pytest.mark.slow
def test_incomplete_weights_are_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    change_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(DataError, match=r"lack 1 tensors, such as model.layers.1.mlp.up_proj"):
        prepare_causal_lm(ModelSection(path=folder), torch.float32)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "model.safetensors").unlink()

    with pytest.raises(DataError, match=f"model.path: {folder} has neither model.safetensors nor"):
        prepare_causal_lm(ModelSection(path=folder), torch.float32)


def test_quantised_weights_without_the_library_that_reads_them_are_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(DataError, match=f"model.path: {folder} cannot be loaded: .*(?i:gptq)"):
        prepare_causal_lm(ModelSection(path=folder), torch.float32)


def test_unexpected_weights_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path)
    change_weights(folder, lambda weights: weights.update(extra=torch.zeros(2)))

    with caplog.at_level(logging.WARNING):
        prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)

    assert prepared.weights is not None


@pytest.mark.slow
def test_a_torn_file_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)
    assert prepared.weights is not None
    (folder / "model.safetensors").write_bytes(b"nonsense")

    with pytest.raises(DataError, match=f"model.path: {folder} cannot be loaded"):
        prepared.weights.fill(make_model().state_dict())
    with pytest.raises(DataError, match=rf"model.path: {folder}/model.safetensors is no safetens"):
        StoredWeights(folder)


@pytest.mark.slow
def test_a_head_of_its_own_is_trained_and_exported_though_the_config_ties_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path / "model")
    change_weights(folder, add_head)
    auto: Any = AutoModelForCausalLM
    expected = auto.from_pretrained(folder)

    prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)
    tensors = {
        name: torch.empty_like(p, device="cpu") for name, p in prepared.model.named_parameters()
    }
    assert prepared.weights is not None
    prepared.weights.fill(tensors)
    exported = tmp_path / "exported"
    section = ModelSection(path=folder)
    write_whole_model(prepared.model, dict(tensors), exported, section, torch.float32)

    assert "config.json ties the head to the embeddings" in caplog.text
    assert torch.equal(tensors[HEAD], expected.lm_head.weight)
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(auto.from_pretrained(exported).lm_head.weight, tensors[HEAD])


def test_other_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    change_weights(folder, lambda weights: weights.update(other=weights[EMBEDDINGS] + 1))
    model = prepare_causal_lm(ModelSection(path=folder), torch.float32).model
    model.register_parameter("other", model.get_parameter(EMBEDDINGS))

    with pytest.raises(DataError, match=rf"ties (other|{EMBEDDINGS}) to .* which have other value"):
        StoredWeights(folder).obstacle(model)
