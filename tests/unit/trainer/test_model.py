"""Loading the model to be trained, and the errors if it cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_models import make_model, save_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Lfm2Config,
    MambaConfig,
    NemotronConfig,
)
from whole_model import load_whole_model

from umbra.runtime.errors import ConfigError
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.model_loading import (
    _packing_obstacle,  # pyright: ignore[reportPrivateUsage]
    prepare_causal_lm,
)

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_models_with_plain_causal_attention_are_packed(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path, kind)

    model, is_packed = load_whole_model(ModelSection(path=tmp_path), torch.float64)

    assert is_packed
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    for name, parameter in make_model(kind).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.double()), name


def test_sliding_windows_are_left_to_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, "mistral-window")

    model, is_packed = load_whole_model(ModelSection(path=tmp_path), torch.float32)

    assert not is_packed
    assert "sliding-window" in caplog.text
    tokens = torch.arange(2, 22)[None]
    expected = make_model("mistral-window")(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected)
    with pytest.raises(ConfigError, match=r"model.attention = 'packed' is not possible"):
        load_whole_model(ModelSection(path=tmp_path, attention="packed"), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Lfm2Config(**SMALL, full_attn_idxs=[1]), "layers of type conv"),
        (MambaConfig(**SMALL, state_size=4), "layers of type linear_attention"),
        (NemotronConfig(**SMALL, intermediate_size=64), "blocks pass on nothing"),
    ],
    ids=["lfm2", "mamba", "nemotron"],
)
def test_what_is_not_only_attention_is_not_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, why: str
) -> None:
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("layer_types", None)  # which older files leave to the architecture
    (tmp_path / "config.json").write_text(json.dumps(written))

    _, is_packed = load_whole_model(ModelSection(path=tmp_path), torch.float32)

    assert not is_packed
    assert why in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_decoder"), [("bert", False), ("bert", True), ("gpt_neox", False)]
)
def test_an_encoder_is_refused_though_its_config_names_a_head_that_generates(
    tmp_path: Path, kind: str, is_decoder: bool
) -> None:
    small = {**SMALL, "intermediate_size": 64, "is_decoder": is_decoder}
    auto: Any = AutoModelForCausalLM
    configs: Any = AutoConfig
    auto.from_config(configs.for_model(kind, **small)).save_pretrained(tmp_path)
    section = ModelSection(path=tmp_path)

    if is_decoder or kind == "gpt_neox":  # always causal
        prepare_causal_lm(section, torch.float32)
        return
    with pytest.raises(ConfigError, match=r"is a BertLMHeadModel without is_decoder"):
        prepare_causal_lm(section, torch.float32)


def test_what_a_model_does_not_train_and_computes_in_its_dtype_is_a_parameter(
    tmp_path: Path,
) -> None:
    auto: Any = AutoModelForCausalLM
    configs: Any = AutoConfig
    small = {**SMALL, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 64}
    auto.from_config(configs.for_model("hrm_text", **small)).save_pretrained(tmp_path)

    prepared = prepare_causal_lm(ModelSection(path=tmp_path), torch.bfloat16)

    assert prepared.model.get_parameter("model.z_L_init").dtype == torch.bfloat16


def test_a_state_shows_though_no_config_tells_of_it() -> None:
    model = make_model()
    assert _packing_obstacle(model) == ""
    model.model.layers[0].mixer = torch.nn.Conv1d(1, 1, 2)  # as a model with code of its own may

    assert "carry a state from token to token" in _packing_obstacle(model)
