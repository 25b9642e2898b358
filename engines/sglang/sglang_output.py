"""The tokens of one request as they gather in SGLang's frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.engines.shell.engine_core import NewOutput


class SglangOutput:
    """Reads what the frontend (TokenizerManager) makes of one request.

    Its first chunk brings the list to which the frontend adds all later tokens, so that no task
    has to wake for each of them.

    Args:
        interval: tokens from one of its scheduler's messages to the next.
    """

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._entries: Sequence[Sequence[Any]] = ()  # (logprob, token, text or None)
        self._num_taken = 0
        self._num_older = 0  # of all tokens
        self._limit: int | None = None  # of tokens; what comes after them is of no interest
        self._reason: str | None = None
        self.changed = asyncio.Event()

    def feed(self, chunk: Mapping[str, Any]) -> None:
        """A chunk of SGLang's answer; only the first and the last bring anything new."""
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
            # SGLang 0.5.17 loses the first one of a request that it put back while its prompt was
            # computed, and sends an empty message instead: so nothing has been taken yet.
            self._entries = ()
            reason = {"type": "abort"}
        self.end(_word(reason))

    def end(self, reason: str) -> None:
        """Nothing follows what has come by now."""
        if self._limit is None:
            self._limit = len(self._entries)
            self._reason = reason
            self.changed.set()

    def expect_older(self) -> None:
        """New weights come while the request is frozen; its next tokens may be of the older ones.

        These are what has not been sent, and one more: SGLang computes a batch while it looks at
        the one before, so of one that is done when it freezes the tokens come after it goes on.
        """
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
    """SGLang's finish reason as one of umbra's, or what went wrong."""
    kind = str(reason.get("type"))
    if kind == "stop" and not isinstance(reason.get("matched"), int):
        return str(reason.get("matched"))  # "NaN happened"
    if kind == "abort" and reason.get("status_code") is not None:
        return str(reason.get("message"))
    return kind
