from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from umbra.runtime.process.host_memory import trim_heap
from umbra.runtime.text.model_tokenizer import ModelTokenizer

_LONG_TEXT_LEN: Final = 1 << 16
"""Characters above which a text counts as long. Tokenizing this many takes about 50 ms, which a
short prompt may have to wait; below a few thousand, most prompts would be long."""


class ModelText:
    """Tokenizes a served model's prompts and decodes tokens exactly as in training.

    An async context manager; owns two threads that tokenize. Long texts share one of them, so that
    a short text never waits for a long one. `extra_stop_ids` and `stops` end a completion like the
    model's own end-of-text tokens. The constructor raises DataError for an unusable tokenizer.
    """

    def __init__(
        self,
        model_path: Path,
        extra_stop_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        *,
        trust_remote_code: bool,
    ) -> None:
        self._tokenizer = ModelTokenizer.open(model_path, trust_remote_code=trust_remote_code)
        # By its token, because the text of a special token may not be shown.
        alone = [ids[0] for ids in map(self._tokenizer.encode, stops) if len(ids) == 1]
        self.stop_token_ids = self._tokenizer.stop_token_ids([*extra_stop_ids, *alone])
        self.stops = stops
        self.max_token_nbytes = self._tokenizer.max_token_nbytes
        self.decode = self._tokenizer.decode
        self.decode_completion = self._tokenizer.decode_completion
        self._short = ThreadPoolExecutor(1, "tokenizer")
        self._long = ThreadPoolExecutor(1, "tokenizer-long")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt."""
        return await self._tokenize(self.encode_now, text)

    async def render_chat(
        self,
        messages: Sequence[object],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool,
    ) -> str:
        """See `ModelTokenizer.render_chat`."""
        render = partial(self._tokenizer.render_chat, continue_final_message=continue_final_message)
        return await asyncio.get_running_loop().run_in_executor(
            self._short, render, messages, variables
        )

    async def encode_rendered(self, text: str) -> list[int]:
        return await self._tokenize(self._tokenizer.encode, text)

    def encode_chat_now(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        """Renders and tokenizes a conversation in the caller's own thread."""
        return self._tokenizer.encode_chat(messages, **variables)

    def encode_now(self, text: str) -> list[int]:
        return self._tokenizer.encode_prompt(text)

    async def _tokenize(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        loop = asyncio.get_running_loop()
        if len(text) < _LONG_TEXT_LEN:
            return await loop.run_in_executor(self._short, encode, text)
        return await loop.run_in_executor(self._long, _encode_and_trim, encode, text)


def _encode_and_trim(encode: Callable[[str], list[int]], text: str) -> list[int]:
    try:
        return encode(text)
    finally:
        trim_heap()  # the tokenizer allocates some hundred bytes per byte of text
