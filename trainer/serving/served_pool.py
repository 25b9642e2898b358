from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import DataError, RequestRefused
from umbra.runtime.process.host_memory import trim_heap
from umbra.runtime.rollout.dispatch.generator import GenerationOptions, Generator
from umbra.runtime.rollout.rollout_config import DispatchConfig
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.serving.choice import Sampling, Step, generate_choice
from umbra.trainer.serving.openai_messages import (
    AnswerForm,
    ApiError,
    ChatForm,
    ChatRequest,
    CompletionForm,
    CompletionRequest,
    SamplingRequest,
)

_MAX_OPEN: Final = 4096
"""Choices in progress at a time. With more, the last ones would wait for minutes; a lower limit
would refuse what an evaluation harness sends at once."""
_AWAKE_OR_ASLEEP: Final = frozenset(
    {EngineState.SERVING, EngineState.PAUSED, EngineState.ASLEEP, EngineState.WAKING}
)
_LONG_TEXT_LEN: Final = 1 << 16
"""Characters above which a text counts as long. Tokenizing this many takes about 50 ms, which a
short prompt may have to wait; below a few thousand, most prompts would be long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPoolConfig:
    """The settings of one served pool."""

    model: str  # clients may use it besides the pool's own name
    model_path: str  # for the tokenizer
    section: str  # of the config, which defines the pool
    path_setting: str  # the setting that has the directory
    dispatch: DispatchConfig
    adapters: Sequence[str] = ()  # names of LoRA adapters, by which clients call the model with one
    extra_stop_ids: Sequence[int] = ()  # end a completion, like the model's own end-of-text tokens
    stops: Sequence[str] = ()  # texts that do
    # Variables of the chat template, if a request has no others.
    template_variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trust_remote_code: bool = False

    @property
    def pool(self) -> str:
        """The pool's own name."""
        return self.dispatch.pool

    @property
    def models(self) -> list[str]:
        """The base model's name and the adapters'."""
        return [self.model, *self.adapters]

    @property
    def names(self) -> list[str]:
        """The names that requests may use: its models, and the pool's own name for the first."""
        return self.models if self.pool == self.model else [*self.models, self.pool]

    def open_text(self) -> ModelText:
        """Raises DataError, see `ModelText`."""
        path = Path(self.model_path)
        try:
            return ModelText(
                path, self.extra_stop_ids, self.stops, trust_remote_code=self.trust_remote_code
            )
        except DataError as error:
            raise DataError(str(error).replace("model.path", self.path_setting)) from error


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A checked request: the prompts to complete, and the format of the answer."""

    pool: ServedPool
    prompts: list[list[int]]
    num_each: int
    sampling: Sampling
    form: AnswerForm
    decode: Callable[[Sequence[int]], str]
    is_stream: bool
    wants_usage: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_each


class ServedPool:
    """Turns requests into jobs and jobs into choices.

    Owns `text`, which must be entered, and `generator`, which must run. The constructor raises
    DataError if the model directory has no usable tokenizer.
    """

    def __init__(
        self, config: ServedPoolConfig, context: ActorContext, note: Callable[[str], None]
    ) -> None:
        self.model = config.model
        self.names = config.names
        self._adapters = config.adapters
        self.is_time_sliced = config.dispatch.shares_memory
        self.generator = Generator(config.dispatch, context, note)
        self.text = config.open_text()
        self._template_variables = config.template_variables

    async def completion(self, request: CompletionRequest) -> GenerationJob:
        """Raises ApiError."""
        for prompt in request.prompts:
            self._check_size(prompt, "prompt")
        vocab_size = self.generator.vocab_size
        prompts = [
            await self.text.encode(prompt)
            if isinstance(prompt, str)
            else _checked(prompt, "prompt", vocab_size)
            for prompt in request.prompts
        ]
        form = CompletionForm(
            self._model(request.model), self._decode(request), request.wants_logprobs
        )
        return self._job(request, prompts, request.max_tokens, form, "prompt")

    async def chat(self, request: ChatRequest) -> GenerationJob:
        """Raises ApiError."""
        if "chat_template" in request.chat_template_kwargs:  # a program, which may never end
            raise ApiError(
                400,
                "chat_template_kwargs has 'chat_template', but chats are rendered by the model's "
                "own: leave it out, or render the chat yourself and send it to /v1/completions",
                param="chat_template_kwargs",
            )
        if not (request.add_generation_prompt or request.continue_final_message):
            raise ApiError(
                400,
                "add_generation_prompt false is supported only with continue_final_message true",
                param="add_generation_prompt",
            )
        variables = {**self._template_variables, **request.chat_template_kwargs}
        try:
            rendered = await self.text.render_chat(
                request.messages, variables, continue_final_message=request.continue_final_message
            )
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        self._check_size(rendered, "messages")
        prompt = await self.text.encode_rendered(rendered)
        form = ChatForm(self._model(request.model), self._decode(request), request.logprobs)
        return self._job(request, [prompt], request.budget, form, "messages")

    def choices(self, job: GenerationJob) -> list[AsyncGenerator[Step, None]]:
        """The steps of each choice; they raise the errors of `Generator.stream`."""
        prompts = [prompt for prompt in job.prompts for _ in range(job.num_each)]
        return [
            generate_choice(self.generator, job.decode, prompt, job.sampling.at(index))
            for index, prompt in enumerate(prompts)
        ]

    @property
    def has_started(self) -> bool:
        """Whether all its engines were up once."""
        states = self.generator.states
        return bool(states) and EngineState.STARTING not in states

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves, or, if the pool is time-sliced, is awake or asleep."""
        if not self.is_time_sliced:
            return self.generator.is_serving
        return not _AWAKE_OR_ASLEEP.isdisjoint(self.generator.states)

    def describe(self) -> list[dict[str, Any]]:
        """Its entries in the list of models."""
        return [self.describe_model(name) for name in (self.model, *self._adapters)]

    def describe_model(self, name: str) -> dict[str, Any]:
        """The entry of the model that answers to one of the pool's names."""
        model = self._model(name)
        return {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "umbra",
            "max_model_len": self.generator.max_context_len,
            **({"parent": self.model} if model in self._adapters else {}),
        }

    def _model(self, name: str | None) -> str:
        return name if name is not None and name in self._adapters else self.model

    def _decode(self, request: SamplingRequest) -> Callable[[Sequence[int]], str]:
        return self.text.decode if request.skip_special_tokens else self.text.decode_completion

    def _job(
        self,
        request: SamplingRequest,
        prompts: list[list[int]],
        budget: int | None,
        form: AnswerForm,
        param: str,
    ) -> GenerationJob:
        for prompt in prompts:
            self._check_length(prompt, budget, param)
        stop_token_ids = _checked(request.stop_token_ids, "stop_token_ids")
        model = self._model(request.model)
        options = GenerationOptions(
            budget,
            request.temperature,
            sorted({*self.text.stop_token_ids, *stop_token_ids}),
            request.seed,
            model if model in self._adapters else "",
        )
        sampling = Sampling(options=options, stops=[*request.stops, *self.text.stops])
        wants_usage = request.stream_options.include_usage
        decode = self._decode(request)
        job = GenerationJob(
            self, prompts, request.n, sampling, form, decode, request.stream, wants_usage
        )
        num_open = self.generator.num_open
        if num_open + job.num_choices > _MAX_OPEN:
            raise ApiError(
                429,
                f"{job.num_choices} choices are too many now: {num_open} are in progress, at most "
                f"{_MAX_OPEN} may be; try again later, or with fewer",
            )
        return job

    def _check_size(self, prompt: str | list[int], param: str) -> None:
        """Refuses a prompt that cannot fit, before tokenizing takes time and memory."""
        limit = self.generator.max_context_len
        if not isinstance(prompt, str):
            if len(prompt) > limit:
                self._check_length(prompt, None, param)
            return
        token_nbytes = self.text.max_token_nbytes
        nbytes = len(prompt.encode())
        if nbytes > limit * token_nbytes:
            raise ApiError(
                400,
                f"{param} of {nbytes} bytes: the context holds {limit} tokens, which are at most "
                f"{limit * token_nbytes} bytes of text ({token_nbytes} a token): shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _check_length(self, prompt: Sequence[int], budget: int | None, param: str) -> None:
        limit = self.generator.max_context_len
        if not prompt:
            raise ApiError(400, f"{param} has no tokens", param=param)
        if len(prompt) + (budget or 1) > limit:
            asked = f" and max_tokens {budget}" if budget else ""
            raise ApiError(
                400,
                f"{param} of {len(prompt)} tokens{asked}: the context holds {limit} tokens",
                param=param,
                code="context_length_exceeded",
            )


def _checked(tokens: list[int], param: str, vocab_size: int = 0) -> list[int]:
    try:
        token_ids(tokens, vocab_size, param)
    except RequestRefused as error:
        raise ApiError(400, str(error), param=param) from None
    return tokens


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
