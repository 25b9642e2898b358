"""Converts text to tokens and back with the model's own tokenizer, without torch if possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from umbra.runtime.engine_api.hub_snapshot import local_model
from umbra.runtime.errors import ConfigError, DataError, how_to_install


class TextCodec:
    """Wraps a tokenizer.

    Attributes:
        encode: tokens of a text, without special tokens.
        encode_prompt: tokens of a text, with the special tokens that the tokenizer adds.
        decode: text of tokens, without special tokens.
        decode_all: text of tokens, special tokens included.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        encode_prompt: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        decode_all: Callable[[Sequence[int]], str],
    ) -> None:
        self.encode = encode
        self.encode_prompt = encode_prompt
        self.decode = decode
        self.decode_all = decode_all

    @classmethod
    def open(cls, path: str) -> TextCodec:
        """Opens a `tokenizer.json`, or the model directory that holds one.

        Raises:
            DataError: there is no tokenizer, or it is damaged.
            ConfigError: neither `tokenizers` nor `transformers` is installed.
        """
        target = Path(local_model(path, with_weights=False))
        if not target.exists():
            raise DataError(f"there is no directory {target}, which should hold a tokenizer")
        file = target / "tokenizer.json" if target.is_dir() else target
        return cls._from_json(file) if file.is_file() else cls._from_transformers(target)

    @classmethod
    def _from_json(cls, file: Path) -> TextCodec:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"text of tokens needs `tokenizers`: {how_to_install('train')}"
            ) from error
        try:
            tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(f"{file} is not a usable tokenizer: {error}") from error
        return cls(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            lambda text: tokenizer.encode(text).ids,
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
        )

    @classmethod
    def _from_transformers(cls, path: Path) -> TextCodec:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"{path} has no tokenizer.json, and reading other kinds needs `transformers`: "
                + how_to_install("train")
            ) from error
        auto: Any = transformers.AutoTokenizer
        try:
            tokenizer = auto.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} holds no tokenizer: {error}") from error
        return cls(
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            lambda text: tokenizer.encode(text),
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
        )
