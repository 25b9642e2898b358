"""Impossible settings of a training run are found before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weight_file import write_weight_file

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConfigError, DataError, UmbraError
from umbra.runtime.text.model_files import check_causal
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.services.chosen_settings import choose_settings
from umbra.trainer.services.setup_check import check_critic, check_models, check_setup
from umbra.trainer.sft.sft_command import check_sft_setup

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A config of which nothing is wrong."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    write_weight_file(Path("model/model.safetensors"), {"a": b"1234"})
    Path("train.jsonl").write_text('{"prompt": "1+1="}\n')
    return {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "reward": {"function": "rewards:score"},
        "rollout": {"max_new_tokens": 256},
        "pools": {"judge": {"model_path": "model"}},
        "train": {"steps": 1},
    }


def config_of(values: dict[str, Any], section: str = "", **settings: object) -> TrainerConfig:
    name, _, pool = section.partition(".")
    if pool:
        settings = {pool: {"model_path": "model", **settings}}
    config = check_config(
        TrainerConfig,
        values | ({name: values.get(name, {}) | settings} if section else {}),
        "config",
    )
    return choose_settings(config, has_gpu=False, installed=())[0]


def environment(num_ranks: int = 2, num_local_ranks: int = 2) -> TorchrunEnvironment:
    """The environment of the first rank on a node."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks}
    names["LOCAL_WORLD_SIZE"] = num_local_ranks
    return TorchrunEnvironment.read({name: str(value) for name, value in names.items()})


@pytest.mark.parametrize(
    ("section", "setting", "said"),
    [
        ("", {}, ""),
        ("pool", {"max_context_len": 512}, ""),
        ("pool", {"max_context_len": 513}, r"^pool.max_context_len = 513 exceeds .* = 512: lower"),
        ("pools.judge", {"max_context_len": 513}, r"^pools.judge.max_context_len = 513 exceeds"),
        ("pools.judge", {"model_path": "none"}, r"^pools.judge.model_path: no directory"),
        ("rollout", {"max_new_tokens": 511}, ""),
        ("rollout", {"max_new_tokens": 512}, r"max_new_tokens = 512 leaves no room .* of 512"),
        ("rollout", {"stop_token_ids": [0, 49]}, ""),
        (
            "rollout",
            {"stop_token_ids": [49, 50, 5000]},
            r"^rollout.stop_token_ids has \[50, 5000\], outside .* of 50 \(0 to 49\)",
        ),
        ("data", {"id_column": "id"}, r"line 1: no column 'id'; its columns are 'prompt'"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(
    values: dict[str, Any], section: str, setting: dict[str, Any], said: str
) -> None:
    config = config_of(values, section, **setting)

    if not said:
        check_setup(config, environment())
        return
    with pytest.raises(UmbraError, match=said):
        check_setup(config, environment())


@pytest.mark.parametrize("pool", [{"engine": "vllm"}, {"engine_args": {"max_context_len": 8}}])
def test_how_long_a_context_may_be_is_left_to_an_engine_that_may_know_better(
    values: dict[str, Any], pool: dict[str, Any]
) -> None:
    check_models(config_of(values, "pool", max_context_len=513, **pool))


def test_stop_tokens_of_a_model_without_vocabulary_size_are_not_checked(
    values: dict[str, Any],
) -> None:
    Path("model/config.json").write_text("{}")
    values["pools"] = {}
    values["pool"] = {"engine": "vllm"}

    check_setup(config_of(values, "rollout", stop_token_ids=[5000]), environment())


@pytest.mark.parametrize("section", ["pool", "pools.judge"])
@pytest.mark.parametrize(
    ("engine", "change", "said"),
    [
        ({}, {"model_type": "gpt2"}, r"'embedded': model_type 'gpt2' is not supported .* qwen3"),
        ({"engine": "faulty"}, {"model_type": "gpt2"}, r"'faulty': model_type 'gpt2' is not supp"),
        ({}, {"quantization_config": {}}, r"'embedded': quantised models are not supported"),
        ({}, {"rope_scaling": {"rope_type": "yarn"}}, r"'embedded': rope type 'yarn' is not supp"),
        ({"engine": "vllm"}, {"model_type": "gpt2"}, ""),
        ({"engine": "faulty", "engine_args": {"inner": "echo"}}, {"model_type": "gpt2"}, ""),
    ],
)
def test_a_model_that_the_embedded_engine_does_not_know_is_refused_before_it_starts(
    values: dict[str, Any], section: str, engine: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    Path("other").mkdir()
    Path("other/config.json").write_text(json.dumps(MODEL | change))
    write_weight_file(Path("other/model.safetensors"), {"a": b"1234"})
    if section == "pool":
        values["model"] = {"path": "other"}
        config = config_of(values, "pool", **engine)
    else:
        config = config_of(values, section, **{"model_path": "other", **engine})

    if not said:
        check_models(config)
        return
    with pytest.raises(ConfigError, match=rf"^{section}.engine = {said}"):
        check_models(config)


@pytest.mark.parametrize("setting", ["model.path", "pools.judge.model_path"])
@pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
def test_damaged_weights_are_refused_before_anything_starts(
    values: dict[str, Any], setting: str, engine: str
) -> None:
    Path("other").mkdir()
    Path("other/config.json").write_text(json.dumps(MODEL))
    Path("other/model.safetensors").write_bytes(Path("model/model.safetensors").read_bytes()[:-1])
    values["pool"] = {"engine": engine}
    values["pools"]["judge"]["engine"] = engine
    if setting == "model.path":
        values["model"] = {"path": "other"}
    else:
        values["pools"]["judge"]["model_path"] = "other"

    with pytest.raises(DataError, match=rf"^{setting}: other/model\.safetensors has .* cut off"):
        check_setup(config_of(values), environment())


@pytest.mark.parametrize(
    ("engine", "is_refused"), [("embedded", False), ("vllm", True), ("sglang", True)]
)
def test_files_that_an_engine_would_add_to_the_weights_are_refused(
    values: dict[str, Any], engine: str, is_refused: bool
) -> None:
    write_weight_file(Path("model/model_old.safetensors"), {"a": b"5678"})
    served = {
        "model": {"path": "model"},
        "pool": {"engine": engine},
        "pools": {"judge": {"model_path": "model", "engine": engine}},
    }
    config = check_config(ServeConfig, served, "config")

    for section, setting in (("pool", "model"), ("pools.judge", "pools.judge.model_")):
        if is_refused:
            with pytest.raises(DataError, match=rf"^{setting}.*path: model has model_old\.safete"):
                check_models(config, only=section)
        else:
            check_models(config, only=section)
    values["pools"] = {}
    check_models(config_of(values, "pool", engine=engine))  # the trainer sends what it reads


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"architectures": ["ModernBertForMaskedLM"]}, "is a ModernBertForMaskedLM; give a causal"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClass"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder"),
        ({"is_causal": False}, "sees later tokens"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "sees later tokens"),
        ({"architectures": ["RoFormerForCausalLM"], "is_encoder_decoder": False}, ""),
        ({"architectures": ["Gemma4ForConditionalGeneration"]}, ""),
        ({"architectures": ["GPT2LMHeadModel"], "is_decoder": False}, ""),
        ({"use_bidirectional_attention": "vision"}, ""),
    ],
)
def test_a_model_is_causal_by_its_config(tmp_path: Path, model: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))

    if not said:
        check_causal("critic.path", tmp_path)
        return
    with pytest.raises(ConfigError, match=rf"^critic.path: {tmp_path} .*{said}"):
        check_causal("critic.path", tmp_path)
    if said.endswith("SequenceClass"):
        check_causal("critic.path", tmp_path, may_score=True)


def test_every_program_refuses_models_that_are_not_causal(values: dict[str, Any]) -> None:
    write_teacher("encoder", {"architectures": ["BertForMaskedLM"]}, {})
    encoder = {"path": "encoder"}
    chats = {key: values[key] for key in ("model", "data", "train")}
    served = {"model": encoder, "pool": {"engine": "vllm"}}
    judge = {"model_path": "encoder", "engine": "vllm"}
    checks: dict[str, Callable[[], None]] = {
        "model.path: ": lambda: check_setup(config_of(values, "model", **encoder), environment()),
        "critic.path": lambda: check_critic(
            config_of(values | {"critic": encoder}, "train", advantage="gae")
        ),
        "pools.judge.model_path": lambda: check_models(config_of(values, "pools", judge=judge)),
        "model.path": lambda: check_models(check_config(ServeConfig, served, "config")),
        "model.path:": lambda: check_sft_setup(
            check_config(SftConfig, chats | {"model": encoder}, "config"), environment()
        ),
    }

    for setting, check in checks.items():
        with pytest.raises(ConfigError, match=rf"^{setting}.* is a BertForMaskedLM"):
            check()


LONG_ROPE = {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 64}
PHI3 = {**LONG_ROPE, "model_type": "phi3"}


@pytest.mark.parametrize(
    ("engine", "model", "context_len", "said"),
    [
        ("vllm", PHI3, 512, ""),
        ("sglang", PHI3, 64, ""),
        ("sglang", PHI3, 65, r"'longrope' .* up to 64 .*: SGLang has others .* to 64 or less"),
        ("vllm", LONG_ROPE | {"model_type": "phimoe"}, 65, r"'longrope' .* transformers scales"),
        ("vllm", {"rope_scaling": {"type": "dynamic"}, "model_type": "llama"}, 512, ""),
        ("vllm", {"rope_scaling": {"type": "dynamic"}, "model_type": "llama"}, 513, r"'dynamic'"),
        ("sglang", {"text_config": {**PHI3, "vocab_size": 9}}, 65, r"'longrope'"),
        ("sglang", {"rope_parameters": {"full": LONG_ROPE["rope_parameters"]}}, 513, r"'longrope'"),
        ("sglang", {"rope_parameters": {"rope_type": "yarn"}}, 513, ""),
    ],
)
def test_rotary_frequencies_that_would_differ_are_refused(
    values: dict[str, Any], engine: str, model: dict[str, Any], context_len: int, said: str
) -> None:
    Path("model/config.json").write_text(json.dumps(MODEL | model))
    values |= {"pools": {}, "rollout": {"max_new_tokens": 8}}
    config = config_of(values, "pool", engine=engine, max_context_len=context_len)

    if not said:
        check_setup(config, environment())
        return
    with pytest.raises(ConfigError, match=rf"^pool.max_context_len = {context_len}, .*{said}"):
        check_setup(config, environment())


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_job_whose_nodes_may_change_has_to_resume(values: dict[str, Any], resume: str) -> None:
    config = config_of(values, "run", resume=resume)
    elastic = replace(environment(), nodes_may_change=True)

    if resume == "auto":
        check_setup(config, elastic)
        return
    with pytest.raises(ConfigError, match=r"run\.resume = 'never'.*set run\.resume = 'auto'"):
        check_setup(config, elastic)


TOKENS = {"a": 0, "b": 1, "c": 2}


def write_teacher(folder: str, model: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(MODEL | model))
    Path(folder, "tokenizer.json").write_text(json.dumps(tokenizer))
    write_weight_file(Path(folder, "model.safetensors"), {"a": b"1234"})


@pytest.mark.parametrize(
    ("vocabulary", "model", "said"),
    [
        (TOKENS, {}, ""),
        ({"a": 0, "b": 1}, {}, r"token 'c' is 2 .*, and not a token in that of critic \(3\)"),
        (TOKENS, {"vocab_size": 49}, "may generate 50 tokens, and this model knows 49"),
    ],
)
def test_a_critic_that_could_not_read_every_completion_is_refused(
    values: dict[str, Any], vocabulary: dict[str, int], model: dict[str, Any], said: str
) -> None:
    added = [{"content": "<eos>", "id": 3}]
    own = {"model": {"vocab": TOKENS}, "added_tokens": added}
    Path("model/tokenizer.json").write_text(json.dumps(own))
    write_teacher("critic", model, {"model": {"vocab": vocabulary}, "added_tokens": added})
    values["critic"] = {"path": "critic"}
    config = config_of(values, "train", advantage="gae")

    if not said:
        check_setup(config, environment())
        Path("critic/model.safetensors").unlink()
        with pytest.raises(DataError, match=r"^critic\.path: "):
            check_setup(config, environment())
        return
    with pytest.raises(ConfigError, match=rf"^critic\.path: .*{said}"):
        check_setup(config, environment())


@pytest.mark.parametrize(
    ("vocabulary", "model", "pool", "said"),
    [
        (TOKENS, {}, {}, ""),
        (TOKENS | {"<think>": 4}, {"vocab_size": 60}, {}, ""),
        ({"a": 0, "c": 1, "b": 2}, {}, {}, r"token 'b' is 1 in .* model \(4 tokens\), and 2 in"),
        ({"a": 0, "b": 1}, {}, {}, r"token 'c' is 2 .*, and not a token in that of teacher \(3\)"),
        (TOKENS, {"vocab_size": 49}, {}, "may generate 50 tokens, and this model knows 49"),
        (TOKENS, {}, {"max_context_len": 511}, "max_context_len is 511, and .* need 512: set"),
        (TOKENS, {"max_position_embeddings": 600}, {"engine": "vllm"}, ""),
        (TOKENS, {}, {"engine": "vllm"}, "max_context_len is 512, and .* need 513: set it"),
    ],
)
def test_a_teacher_that_could_not_score_every_completion_is_refused_by_name(
    values: dict[str, Any],
    vocabulary: dict[str, int],
    model: dict[str, Any],
    pool: dict[str, Any],
    said: str,
) -> None:
    added = [{"content": "<eos>", "id": 3}]
    own = {"model": {"vocab": TOKENS}, "added_tokens": added}
    Path("model/tokenizer.json").write_text(json.dumps(own))
    write_teacher("teacher", model, {"model": {"vocab": vocabulary}, "added_tokens": added})
    values["pools"] = {"teacher": {"model_path": "teacher", **pool}}
    config = config_of(values, "train", teacher_kl_coef=1.0)

    if not said:
        check_setup(config, environment())
        return
    with pytest.raises(ConfigError, match=rf"^pools\.teacher\..*{said}"):
        check_setup(config, environment())


def test_vocabularies_of_unigram_tokenizers_are_compared_and_missing_ones_refused(
    values: dict[str, Any],
) -> None:
    pairs = [[token, -1.0] for token in TOKENS]
    Path("model/tokenizer.json").write_text(json.dumps({"model": {"vocab": TOKENS}}))
    write_teacher("teacher", {}, {"model": {"vocab": pairs}})
    values["pools"] = {"teacher": {"model_path": "teacher"}}
    config = config_of(values, "train", teacher_kl_coef=1.0)

    check_setup(config, environment())

    Path("teacher/tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"^pools.teacher.model_path: .*tokenizer.json cannot be "):
        check_setup(config, environment())
