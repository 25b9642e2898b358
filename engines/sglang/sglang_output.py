from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.engines.shell.engine_core import NewOutput


class SglangOutput:
    """The tokens of one request, as the frontend (TokenizerManager) receives them. The first chunk
    carries the list to which the frontend appends all later tokens, so no task has to wake for each
    token. SGLang's scheduler sends a message every `interval` tokens."""

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._entries: Sequence[Sequence[Any]] = ()  # (logprob, token, text or None)
        self._num_taken = 0
        self._num_older = 0  # among all tokens
        self._limit: int | None = None  # in tokens; later ones are ignored
        self._reason: str | None = None
        self.changed = asyncio.Event()

    def feed(self, chunk: Mapping[str, Any]) -> None:
        """Takes a chunk of SGLang's answer; only the first and the last carry anything new."""
        if self._limit is not None:
            return
        meta = chunk["meta_info"]
        if not self._entries:
            self._entries = meta.get("output_token_logprobs") or ()
            self.changed.set()
        reason = meta.get("finish_reason")
        if reason is None:
            return
        if meta.get("completion_tokens", len(self._entries)) != len(self._entries):
            # SGLang 0.5.17 loses the first token of a request that it preempts during prefill, and
            # sends an empty message instead, so nothing has been taken yet.
            self._entries = ()
            reason = {"type": "abort"}
        self.end(_word(reason))

    def end(self, reason: str) -> None:
        if self._limit is None:
            self._limit = len(self._entries)
            self._reason = reason
            self.changed.set()

    def expect_older(self) -> None:
        """Announces new weights while the request is frozen: its next tokens may be older. These
        are the tokens not sent yet, and one more: SGLang computes a batch while it processes the
        last one, so a batch done at the freeze delivers its tokens after the resume."""
        self._num_older = len(self._entries) + self._interval

    def take(self) -> NewOutput | None:
        self.changed.clear()
        start, reason = self._num_taken, self._reason
        end = len(self._entries) if self._limit is None else self._limit
        if end == start and reason is None:
            return None
        self._num_taken, self._reason = end, None
        new = self._entries[start:end]
        return NewOutput(
            tokens=[entry[1] for entry in new],
            logprobs=[entry[0] for entry in new],
            finish_reason=reason,
            num_older=max(0, min(self._num_older, end) - start),
        )


def _word(reason: Mapping[str, Any]) -> str:
    kind = str(reason.get("type"))
    if kind == "stop" and not isinstance(reason.get("matched"), int):
        return str(reason.get("matched"))  # "NaN happened"
    if kind == "abort" and reason.get("status_code") is not None:
        return str(reason.get("message"))
    return kind
