"""The model's own tokenizer, for prompts. Completions are never tokenized again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from umbra.runtime.errors import DataError

# Longest context if the config does not set one; an engine's KV cache grows with it.
_DEFAULT_CONTEXT_LEN: Final = 4096
_MAX_CHARACTER_NBYTES: Final = 4  # in UTF-8


class PromptTokenizer:
    """Turns prompts into tokens exactly as `transformers` does for this model directory.

    Raises (on construction):
        DataError: the directory holds no usable tokenizer, or one with more tokens than the
            model has embeddings.
    """

    def __init__(self, model_path: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self.model_path = model_path
        auto: Any = AutoTokenizer
        try:
            self._tokenizer = auto.from_pretrained(
                str(model_path), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise _no_tokenizer(model_path, _first_line(error)) from error
        # Without files, transformers would make an empty tokenizer of the model's kind.
        files = set[str](self._tokenizer.vocab_files_names.values())
        if files and not any((model_path / name).exists() for name in files):
            raise _no_tokenizer(model_path, f"none of {', '.join(sorted(files))} is there")
        self._check_vocabulary(model_path)

    @property
    def raw(self) -> Any:
        """The transformers tokenizer."""
        return self._tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return cast("int | None", self._tokenizer.eos_token_id)

    @property
    def max_token_nbytes(self) -> int:
        """The most bytes of UTF-8 text that one token stands for.

        This is the longest entry of the vocabulary, whose alphabet may take more bytes than the
        text, but never fewer; an unknown character takes four. A token can only stand for more if
        the tokenizer shortens text, drops spaces, or has one token for any unknown word.
        """
        entries: Iterable[str] = self._tokenizer.get_vocab()
        return max(_MAX_CHARACTER_NBYTES, *(len(entry.encode()) for entry in entries))

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the tokenizer adds."""
        return cast("list[int]", self._tokenizer(text)["input_ids"])

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """The text of a conversation up to the beginning of the assistant's answer.

        Raises:
            DataError: there is no chat template, or it does not accept the messages.
        """
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self.model_path}: the tokenizer has no chat template, so it cannot render "
                "messages; add one, or give plain prompts (data.format = 'text')"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"the chat template refused the messages: {_first_line(error)}"
            ) from error
        return cast("str", text)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of a rendered conversation, whose template wrote the special tokens."""
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_vocabulary(self, model_path: Path) -> None:
        vocab_size = read_model_config(model_path).get("vocab_size")
        highest = max(self._tokenizer.get_vocab().values(), default=-1)
        if isinstance(vocab_size, int) and highest >= vocab_size:
            raise DataError(
                f"model.path: the tokenizer in {model_path} has token id {highest}, but the model "
                f"has vocab_size {vocab_size}: they do not belong together; copy the tokenizer "
                "that the model was trained with, or resize the model's embeddings"
            )


def _no_tokenizer(model_path: Path, cause: str) -> DataError:
    return DataError(
        f"model.path: {model_path} holds no usable tokenizer ({cause}); it needs tokenizer.json "
        "and tokenizer_config.json"
    )


def read_model_config(model_path: Path) -> dict[str, Any]:
    """config.json of a model directory.

    Raises:
        DataError: no such directory, or no readable config.json in it.
    """
    try:
        is_folder = model_path.is_dir()
    except OSError as error:
        raise DataError(
            f"model.path: {model_path.absolute()} cannot be read: {error.strerror}"
        ) from error
    if not is_folder:
        raise DataError(
            f"model.path: no directory {model_path.absolute()}; give a Hugging Face model "
            "directory (config.json, safetensors, tokenizer.json)"
        )
    advice = "it is not a Hugging Face model directory"
    if (model_path / "export" / "config.json").exists():
        advice += f"; that of the run's model is {model_path / 'export'}"
    return _read_json(model_path / "config.json", advice)


def vocab_size(model_path: Path) -> int:
    """The model's vocabulary size; 0 if its config.json does not have it.

    Raises: as for `read_model_config`.
    """
    config = read_model_config(model_path)
    sections = (config, config.get("text_config"))  # the second is of models that take images, too
    known = [
        cast("dict[str, Any]", section).get("vocab_size")
        for section in sections
        if isinstance(section, dict)
    ]
    return next((size for size in known if isinstance(size, int) and size > 0), 0)


def stop_token_ids(
    model_path: Path, tokenizer: PromptTokenizer, extra: Sequence[int] = ()
) -> list[int]:
    """Token ids that end a completion: of the generation config, else config, else tokenizer.

    Raises:
        DataError: none is known, so that no completion would end by itself.
    """
    known = known_stop_token_ids(model_path)
    if not known and tokenizer.eos_token_id is not None:
        known = [tokenizer.eos_token_id]
    if known or extra:
        return sorted({*known, *extra})
    raise DataError(
        f"model.path: {model_path} names no eos_token_id (generation_config.json, config.json or "
        "the tokenizer): add it there, or for the policy set rollout.stop_token_ids"
    )


def known_stop_token_ids(model_path: Path) -> list[int]:
    """Token ids that end a text, from the generation config, else the config; may be empty."""
    generation_path = model_path / "generation_config.json"
    generation = _read_json(generation_path, "") if generation_path.exists() else {}
    for source in (generation, read_model_config(model_path)):
        found = source.get("eos_token_id")
        if found is not None:
            return cast("list[int]", found if isinstance(found, list) else [found])
    return []


def default_context_len(model_path: Path) -> int:
    """The model's limit in tokens, at most 4096."""
    limit = read_model_config(model_path).get("max_position_embeddings")
    return min(limit, _DEFAULT_CONTEXT_LEN) if isinstance(limit, int) else _DEFAULT_CONTEXT_LEN


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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
