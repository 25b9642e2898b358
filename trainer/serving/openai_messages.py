"""Requests, answers and errors in the format of the OpenAI API, and the bodies in progress.

A parameter that would change the answer but is not supported is refused, never silently ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Generator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from umbra.runtime.errors import RequestRefused, RolloutError, UmbraError
from umbra.trainer.serving.choice import Step

_MAX_CHOICES: Final = 128
_MAX_PROMPTS: Final = 256
_MAX_MESSAGES: Final = 16_384
_MAX_STOPS: Final = 16
_MAX_STOP_LEN: Final = 1024
"""Limit in characters. Each token's text is compared with all prefixes of a stop."""
_MAX_STOP_TOKENS: Final = 1024
_COMPLETION_TOKENS: Final = 16
"""Default of `max_tokens` of a completion in the OpenAI API."""

# Parameters that do not affect the answer.
_IGNORED: Final = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls",
    }
)  # fmt: skip
# Parameters that are accepted only with a value that changes nothing.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# The forms of parameters that have several types.
_FORMS: Final[Mapping[str, str]] = {
    "prompt": f"a text or a list of token ids, or a list of up to {_MAX_PROMPTS} of these",
    "stop": f"a text or a list of up to {_MAX_STOPS}, each of 1 to {_MAX_STOP_LEN} characters",
    "stop_token_ids": f"a list of up to {_MAX_STOP_TOKENS} token ids",
}
_WHOLE_DISTRIBUTION: Final = frozenset({"top_p", "top_k", "min_p", "typical_p"})
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Types of errors by HTTP status; others are "invalid_request_error" or "server_error"."""

Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LEN)]
# Checked up to the first wrong item: a body may have millions, and each error takes memory.
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: nothing is added in any case


class SamplingRequest(BaseModel):
    """Parameters of both endpoints."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=_MAX_STOP_TOKENS, fail_fast=True)] = []
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=_MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=_MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=1)] = _COMPLETION_TOKENS
    # 1 would also ask for the best alternative, which is unknown: see docs/serving.md
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt is empty", param="prompt")
        if isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return list(cast("list[str | list[int]]", self.prompt))

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[dict[str, Any]], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def budget(self) -> int | None:
        """None for as many as the context allows."""
        return self.max_completion_tokens or self.max_tokens


_Request = TypeVar("_Request", bound=SamplingRequest)


def parse_body(body: object, kind: type[_Request]) -> _Request:
    """Raises ApiError unless the body is a JSON object of known, supported and right parameters."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    values: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", body).items():
        if value is None or name in _IGNORED:
            continue
        if name in _NEUTRAL:
            _check_neutral(name, value)
        elif name in kind.model_fields:
            values[name] = value
        else:
            raise ApiError(400, f"{name} is not supported here; leave it out", param=name)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _worded(error) from None


def _check_neutral(name: str, value: object) -> None:
    allowed = _NEUTRAL[name]
    if value in allowed:
        return
    why = ""
    if name in _WHOLE_DISTRIBUTION:
        why = ": tokens are drawn from the model's whole distribution"
    only = " or ".join(repr(known) for known in allowed)
    given = reprlib.repr(value)  # shortened: the value may be millions of numbers
    raise ApiError(400, f"{name} {given} is not supported, only {only}{why}", param=name)


def _worded(error: ValidationError) -> ApiError:
    """The first problem; for a union, the problem of its first type."""
    problem = error.errors(include_url=False)[0]
    param = str(problem["loc"][0])
    if problem["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param)
    if param in _FORMS:
        return ApiError(400, f"{param} must be {_FORMS[param]}", param=param)
    where = ".".join(str(part) for part in problem["loc"])
    return ApiError(400, f"{where}: {problem['msg']}", param=param)


class ApiError(Exception):
    """An error for the client, in the OpenAI API's format: {"error": {message, type, param,
    code}}. `status` is of HTTP, `param` the parameter that is wrong, `code` for programs, such
    as "model_not_found"."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError | None:
    """The error to send to the client; None for a bug, whose details clients must not see."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return ApiError(400, str(error))
        case RolloutError():
            return ApiError(503, str(error), code="no_engine")
        case UmbraError():
            return ApiError(500, str(error))
        case _:
            return None


class RequestBodies:
    """Counts the bodies of requests, from their first byte until the answer. One body has at most
    `max_nbytes` and arrives within `limit_s`; all have at most `max_held_nbytes`."""

    def __init__(self, *, max_nbytes: int, max_held_nbytes: int, limit_s: float) -> None:
        self._max_nbytes = max_nbytes
        self._max_held_nbytes = max_held_nbytes
        self._limit_s = limit_s
        self._held_nbytes = 0

    @contextlib.contextmanager
    def holding(self) -> Generator[bytearray]:
        """Yields a body that counts within the block; `read` fills it."""
        body = bytearray()
        try:
            yield body
        finally:
            self._held_nbytes -= len(body)

    async def read(self, chunks: AsyncIterable[bytes], body: bytearray) -> None:
        """Raises ApiError if the body or all of them are too large, or it takes too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                async for chunk in chunks:
                    self._check(len(body), len(chunk))
                    body += chunk
                    self._held_nbytes += len(chunk)
        except TimeoutError:
            raise ApiError(
                408, f"{len(body)} bytes of the body arrived in {self._limit_s:g} s, and no more"
            ) from None

    def _check(self, num_before: int, num_more: int) -> None:
        if num_before + num_more > self._max_nbytes:
            raise ApiError(413, f"the body exceeds {self._max_nbytes} bytes")
        if self._held_nbytes + num_more > self._max_held_nbytes:
            raise ApiError(
                429,
                f"the bodies of the requests in progress have {self._held_nbytes} of at most "
                f"{self._max_held_nbytes} bytes; try again later",
            )


class AnswerForm(ABC):
    """The format of one answer; constructed when the request arrives. `decode` returns the text of
    tokens, for logprobs."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model: str, decode: Callable[[Sequence[int]], str], wants_logprobs: bool
    ) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._decode = decode
        self.wants_logprobs = wants_logprobs

    def whole(self, choices: Sequence[Step], usage: dict[str, int]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                {
                    "index": index,
                    **self._content(step),
                    "logprobs": self._logprobs(step),
                    "finish_reason": step.finish_reason,
                }
                for index, step in enumerate(choices)
            ],
            "usage": usage,
        }

    def chunk(self, index: int, step: Step) -> dict[str, Any]:
        """One step of one choice."""
        choice = {
            "index": index,
            **self._delta(step),
            "logprobs": self._logprobs(step) if step.tokens else None,
            "finish_reason": step.finish_reason or None,
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, if the client asked for usage."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first step, if any."""
        del index
        return None

    @abstractmethod
    def _content(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _format_logprobs(self, texts: list[str], logprobs: list[float]) -> dict[str, Any]: ...

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        return self._format_logprobs(
            [self._decode([token]) for token in step.tokens], step.logprobs
        )


class CompletionForm(AnswerForm):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _content(self, step: Step) -> dict[str, Any]:
        return {"text": step.text}

    _delta = _content

    def _format_logprobs(self, texts: list[str], logprobs: list[float]) -> dict[str, Any]:
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": None,
        }


class ChatForm(AnswerForm):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def _content(self, step: Step) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": step.text, "refusal": None}}

    def _delta(self, step: Step) -> dict[str, Any]:
        return {"delta": {"content": step.text} if step.text else {}}

    def _format_logprobs(self, texts: list[str], logprobs: list[float]) -> dict[str, Any]:
        content = [
            {
                "token": text,
                # Part of a character, whose bytes the text does not show.
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "logprob": logprob,
                "top_logprobs": [],
            }
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
