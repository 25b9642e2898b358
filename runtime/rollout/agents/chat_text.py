"""Renders conversations with a model's own chat template, using transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umbra.runtime.errors import ConfigError, DataError, how_to_install


class ChatText:
    """Renders and tokenizes conversations. Importing transformers takes seconds.

    Raises (on construction):
        ConfigError: `transformers` is not installed.
        DataError: there is no tokenizer, or it has no chat template.
    """

    def __init__(self, path: str) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"chat templates need `transformers`: {how_to_install('train')}"
            ) from error
        auto: Any = transformers.AutoTokenizer
        try:
            self._tokenizer = auto.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} holds no tokenizer: {error}") from error
        if not self._tokenizer.chat_template:
            raise DataError(f"{path}: the tokenizer has no chat template; give plain text instead")

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation up to the beginning of the assistant's answer.

        Raises:
            DataError: the template does not accept the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"the chat template refused the messages: {error}") from error
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens
