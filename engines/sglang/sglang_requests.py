from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Final

from umbra.engines.shell.engine_core import NewOutput
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.errors import EngineError

_MESSAGES_PER_STEP: Final = 5
_MIN_STREAM_INTERVAL: Final = 2
# With an interval of 1, SGLang 0.5.17 sends an empty message for a request that it preempts during
# prefill, and never sends the logprob of its first token.
_MAX_STREAM_INTERVAL: Final = 50


def check_request(request: GenerationRequest, model_stop_ids: Collection[int]) -> None:
    """Raises ValueError where the model's own stop tokens would end a request."""
    others = set(model_stop_ids) - set(request.stop_token_ids)
    if request.stop_token_ids and others:
        raise ValueError(
            f"request {request.id}: SGLang would stop at the model's own end-of-text tokens "
            f"{sorted(others)}, too; add them to stop_token_ids, or leave that empty"
        )


def stream_interval(num_running: int) -> int:
    """Tokens from one message of a request to its next. SGLang's scheduler spends about 27 us on a
    message (0.5.17; 256 requests: 7 ms a step). With 250 running requests the interval is 50, which
    SGLang itself uses for requests that do not stream."""
    interval = num_running // _MESSAGES_PER_STEP
    return min(max(_MIN_STREAM_INTERVAL, interval), _MAX_STREAM_INTERVAL)


def generate_fields(
    request: GenerationRequest, key: str, cache_salt: str, interval: int, adapter_id: str = ""
) -> dict[str, Any]:
    """Arguments for GenerateReqInput, with logprobs of sampled tokens. With `top_p` or `top_k`,
    SGLang reports the whole distribution's logprobs. An `interval` above 1 needs a version with
    `stream_interval`."""
    num_forced = len(request.forced)
    return {
        "rid": key,
        "input_ids": [*request.tokens.tolist(), *request.forced.tolist()],
        "sampling_params": {
            "max_new_tokens": 0 if num_forced else request.max_new_tokens,
            "temperature": request.temperature,  # 0 becomes top_k = 1 at temperature 1
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "stop_token_ids": list(request.stop_token_ids),
            # True would switch off stop_token_ids, too.
            "ignore_eos": not request.stop_token_ids,
            # Used with enable_deterministic_inference only. A draw depends on the seed and the
            # index in the sequence, so a resumed trajectory needs no other seed.
            "sampling_seed": request.seed,
            **({"stream_interval": interval} if interval > 1 else {}),
        },
        "return_logprob": True,
        # -1: none of the prompt. A position's logprob is that of the token behind it.
        "logprob_start_len": len(request.tokens) - 1 if num_forced else -1,
        "stream": True,
        "extra_key": cache_salt,
        **({"lora_id": adapter_id} if adapter_id else {}),
    }


class SglangOutput:
    """The tokens of one request, as the frontend (TokenizerManager) receives them. The first chunk
    carries the list to which the frontend appends all later tokens, so no task has to wake for each
    token. SGLang's scheduler sends a message every `interval` tokens."""

    def __init__(self, interval: int = 1, forced: Sequence[int] = ()) -> None:
        self._interval = interval
        self._forced = forced  # the last tokens of SGLang's prompt, whose logprobs are wanted
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
        if self._forced:
            self._feed_forced(meta)
            return
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

    def _feed_forced(self, meta: Mapping[str, Any]) -> None:
        """SGLang gives the largest token id as 0, so that the ids are not taken from its answer."""
        if (reason := meta.get("finish_reason")) is not None:
            entries: Sequence[Sequence[Any]] = meta.get("input_token_logprobs") or ()
            pairs = zip(entries[-len(self._forced) :], self._forced, strict=False)
            self._entries = [(entry[0], token) for entry, token in pairs]
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


@contextlib.asynccontextmanager
async def until_died(died: asyncio.Event) -> AsyncGenerator[None]:
    async def fail() -> None:
        await died.wait()
        raise EngineError("a process of SGLang ended during the start; the log has the reason")

    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(fail())
            yield
            watch.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


@contextlib.asynccontextmanager
async def within(limit_s: float, what: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise EngineError(f"SGLang did not {what} within {limit_s:g} s") from None
