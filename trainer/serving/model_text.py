"""A model directory's tokenizer, as a server needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from umbra.runtime.rollout.text import TextCodec
from umbra.trainer.tokenizer import PromptTokenizer, stop_token_ids


class ModelText:
    """Prompts become the same tokens, and tokens the same text, as in training.

    An async context manager; owns the one thread that tokenises: a long prompt takes a while, and
    the tokenizer is not to be used by two at a time.

    Args:
        extra_stop_ids: end a completion, besides the model's own end-of-text tokens.

    Raises (on construction):
        DataError: see `PromptTokenizer` and `stop_token_ids`.
    """

    def __init__(
        self, model_path: Path, extra_stop_ids: Sequence[int] = (), *, trust_remote_code: bool
    ) -> None:
        self._tokenizer = PromptTokenizer(model_path, trust_remote_code=trust_remote_code)
        self._codec = TextCodec.open(str(model_path))
        self.stop_token_ids = stop_token_ids(model_path, self._tokenizer, extra_stop_ids)
        self.decode = self._codec.decode
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._tokenizer.encode, text
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        """Tokens of a conversation up to where the assistant answers; raises DataError."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self.encode_chat_now, messages, variables
        )

    def encode_chat_now(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        """The same, in the caller's own thread."""
        rendered = self._tokenizer.render_chat(messages, variables)
        return self._tokenizer.encode_rendered(rendered)

    def encode_now(self, text: str) -> list[int]:
        """`encode` in the caller's own thread."""
        return self._tokenizer.encode(text)
