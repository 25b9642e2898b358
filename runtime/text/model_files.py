"""Reads the JSON files of a Hugging Face model directory. Unreadable ones raise DataError."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.disk import similar_path
from umbra.runtime.errors import ConfigError, DataError

# Longest context if the config does not set one; an engine's KV cache grows with it.
_DEFAULT_CONTEXT_LEN: Final = 4096
# Class names of transformers end in the task: BertForMaskedLM, Qwen2ForSequenceClassification.
_OTHER_TASK: Final = re.compile("For(?!CausalLM|ConditionalGeneration)[A-Z]")
# Decoders of these may be reward models, with which a critic starts.
_SCORES: Final = re.compile("For(Sequence|Token)Classification")


def read_model_config(model_path: Path) -> dict[str, Any]:
    try:
        is_folder = model_path.is_dir()
    except OSError as error:
        raise DataError(
            f"model.path: {model_path.absolute()} cannot be read: {error.strerror}"
        ) from error
    if not is_folder:
        raise DataError(
            f"model.path: no directory {model_path.absolute()}{similar_path(model_path)}; give a "
            "Hugging Face model directory (config.json, safetensors, tokenizer.json)"
        )
    advice = "it is not a Hugging Face model directory"
    if (model_path / "export" / "config.json").exists():
        advice += f"; that of the run's model is {model_path / 'export'}"
    elif (model_path / "adapter_config.json").exists():
        advice = "it has a LoRA adapter and no model: give the folder of a merged export"
    return _read_json(model_path / "config.json", advice)


def check_causal(setting: str, model_path: Path, *, may_score: bool = False) -> None:
    """Raises ConfigError if the model is not a causal language model by its config.json, nor with
    `may_score` a reward model. Encoders whose config leaves that open are found when they are
    built."""
    config = read_model_config(model_path)
    names = cast("list[str]", config.get("architectures") or [])
    reason = ""
    scores = may_score and any(map(_SCORES.search, names))
    if names and not scores and all(map(_OTHER_TASK.search, names)):
        reason = f"is a {names[0]}"
    for section in _sections(config):
        if section.get("is_encoder_decoder"):
            reason = "has an encoder, which reads the prompt"
        elif section.get("is_causal") is False or (
            section.get("use_bidirectional_attention") in (True, "all")
        ):
            reason = "has attention that sees later tokens"
    if reason:
        raise not_causal(setting, model_path, reason)


def not_causal(setting: str, model_path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{setting}: {model_path} {reason}; give a causal language model, which predicts each "
        "token from those before it"
    )


def vocab_size(model_path: Path) -> int:
    """The model's vocabulary size; 0 if its config.json does not have it."""
    return _text_size(model_path, "vocab_size")


def vocabulary(model_path: Path) -> dict[str, int]:
    """The id of each token in tokenizer.json. Raises DataError if there is no such file."""
    advice = "save the tokenizer with a version of transformers that writes it"
    tokenizer = _read_json(model_path / "tokenizer.json", advice)
    model: dict[str, Any] = tokenizer.get("model") or {}
    tokens: Any = model.get("vocab") or {}
    if isinstance(tokens, list):  # of Unigram: pairs of a token and its score
        tokens = {pair[0]: idx for idx, pair in enumerate(cast("list[Any]", tokens))}
    added: list[dict[str, Any]] = tokenizer.get("added_tokens") or []
    return {**tokens, **{token["content"]: token["id"] for token in added}}


def default_context_len(model_path: Path) -> int:
    limit = _text_size(model_path, "max_position_embeddings")
    return min(limit or _DEFAULT_CONTEXT_LEN, _DEFAULT_CONTEXT_LEN)


def _text_size(model_path: Path, key: str) -> int:
    known = (section.get(key) for section in _sections(read_model_config(model_path)))
    return next((size for size in known if isinstance(size, int) and size > 0), 0)


def configured_end_tokens(model_path: Path) -> set[int]:
    """The ids of `eos_token_id` in config.json and generation_config.json, both together."""
    generation_path = model_path / "generation_config.json"
    generation = _read_json(generation_path, "") if generation_path.exists() else {}
    found: set[int] = set()
    for section in (generation, *_sections(read_model_config(model_path))):
        ids = section.get("eos_token_id")
        if ids is not None:
            found.update(cast("list[int]", ids) if isinstance(ids, list) else [ids])
    return found


def _sections(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The config, and its part for text in models that take images, too."""
    text = config.get("text_config")
    return (config, cast("dict[str, Any]", text)) if isinstance(text, dict) else (config,)


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"model.path: {path} cannot be read ({error.strerror}); {remedy}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"model.path: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"model.path: {path} does not hold a JSON object")
    return cast("dict[str, Any]", content)
