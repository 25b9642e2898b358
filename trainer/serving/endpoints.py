"""What the HTTP endpoints of a pool do, without HTTP: requests to choices, choices to answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.generator import Generator
from umbra.trainer.serving.answers import AnswerForm, ChatForm, CompletionForm, usage_of
from umbra.trainer.serving.api_error import ApiError
from umbra.trainer.serving.choice import Sampling, Step, collect, generate_choice
from umbra.trainer.serving.model_text import ModelText
from umbra.trainer.serving.requests import (
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    parse_body,
)

_MAX_OPEN: Final = 4096
"""Choices under way at a time. More are refused: what waits behind so many waits for minutes, and
fewer would refuse what an evaluation harness sends at once."""

_STREAM_AHEAD: Final = 16
"""Steps of an answer's choices that a slow client may leave unread; then they wait, and become
longer ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what is to be generated, and the form that it is told in."""

    prompts: list[list[int]]
    num_each: int
    sampling: Sampling
    form: AnswerForm
    is_stream: bool
    tells_usage: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_each


class Endpoints:
    """Of one pool.

    Args:
        model: the name that clients call the model by.
        template_variables: of the chat template, where a request has no others.
    """

    def __init__(
        self,
        generator: Generator,
        text: ModelText,
        model: str,
        template_variables: Mapping[str, Any],
    ) -> None:
        self._generator = generator
        self._text = text
        self._model = model
        self._template_variables = template_variables

    async def completion(self, body: object) -> Job:
        """A checked /v1/completions. Raises ApiError."""
        request = parse_body(body, CompletionRequest)
        self._check_model(request)
        prompts = [
            await self._text.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in request.prompts
        ]
        form = CompletionForm(self._model, self._text.decode, request.wants_logprobs)
        return self._job(request, prompts, request.max_tokens, form, "prompt")

    async def chat(self, body: object) -> Job:
        """A checked /v1/chat/completions. Raises ApiError."""
        request = parse_body(body, ChatRequest)
        self._check_model(request)
        variables = {**self._template_variables, **request.chat_template_kwargs}
        try:
            prompt = await self._text.encode_chat(request.plain_messages, variables)
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        form = ChatForm(self._model, self._text.decode, request.logprobs)
        return self._job(request, [prompt], request.budget, form, "messages")

    async def whole(self, job: Job) -> dict[str, Any]:
        """The answer in one; raises what `Generator.stream` does, in a group."""
        async with asyncio.TaskGroup() as tasks:
            choices = [tasks.create_task(collect(steps)) for steps in self._choices(job)]
        steps = [choice.result() for choice in choices]
        return job.form.whole(steps, _usage(job, sum(len(step.tokens) for step in steps)))

    async def stream(self, job: Job, write: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Writes the answer as it comes, chunk by chunk; raises as `whole`."""
        steps: asyncio.Queue[tuple[int, Step]] = asyncio.Queue(_STREAM_AHEAD)
        unopened = set(range(job.num_choices))
        num_open, num_tokens = job.num_choices, 0
        async with asyncio.TaskGroup() as tasks:
            for index, choice in enumerate(self._choices(job)):
                tasks.create_task(_feed(steps, index, choice))
            while num_open:
                index, step = await steps.get()
                num_open -= bool(step.finish_reason)
                num_tokens += len(step.tokens)
                opening = job.form.opening(index)
                if index in unopened and opening is not None:
                    await write(opening)
                unopened.discard(index)
                if step.text or step.finish_reason or job.form.wants_logprobs:
                    await write(job.form.chunk(index, step))
        if job.tells_usage:
            await write(job.form.usage_chunk(_usage(job, num_tokens)))

    def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "umbra",
            "max_model_len": self._generator.max_context_len,
        }
        return {"object": "list", "data": [model]}

    # -- private -------------------------------------------------------------------------

    def _choices(self, job: Job) -> list[AsyncGenerator[Step, None]]:
        prompts = [prompt for prompt in job.prompts for _ in range(job.num_each)]
        return [
            generate_choice(self._generator, self._text.decode, prompt, job.sampling.at(place))
            for place, prompt in enumerate(prompts)
        ]

    def _check_model(self, request: SamplingRequest) -> None:
        if request.model not in (None, self._model):
            raise ApiError(
                404,
                f"there is no model {request.model!r} here, only {self._model!r}",
                param="model",
                code="model_not_found",
            )

    def _job(
        self,
        request: SamplingRequest,
        prompts: list[list[int]],
        budget: int | None,
        form: AnswerForm,
        param: str,
    ) -> Job:
        for prompt in prompts:
            self._check_length(prompt, budget, param)
        sampling = Sampling(
            max_new_tokens=budget,
            temperature=request.temperature,
            stops=request.stops,
            stop_token_ids=sorted({*self._text.stop_token_ids, *request.stop_token_ids}),
            seed=request.seed,
        )
        tells_usage = request.stream_options.include_usage
        job = Job(prompts, request.n, sampling, form, request.stream, tells_usage)
        num_open = self._generator.num_open
        if num_open + job.num_choices > _MAX_OPEN:
            raise ApiError(
                429,
                f"{job.num_choices} choices are too many now: {num_open} are under way of at most "
                f"{_MAX_OPEN}; try again later, or with fewer",
            )
        return job

    def _check_length(self, prompt: Sequence[int], budget: int | None, param: str) -> None:
        limit = self._generator.max_context_len
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


async def _feed(
    steps: asyncio.Queue[tuple[int, Step]], index: int, choice: AsyncGenerator[Step, None]
) -> None:
    async with aclosing(choice):
        async for step in choice:
            await steps.put((index, step))


def _usage(job: Job, num_tokens: int) -> dict[str, int]:
    return usage_of(sum(map(len, job.prompts)), num_tokens)
