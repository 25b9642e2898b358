"""The endpoints without HTTP: turns requests into generations, and their choices into answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from umbra.trainer.serving.api_error import ApiError
from umbra.trainer.serving.choice import Step, collect
from umbra.trainer.serving.openai_answers import usage_of
from umbra.trainer.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    parse_body,
)
from umbra.trainer.serving.served_pool import GenerationJob, ServedPool

_STREAM_AHEAD: Final = 16
"""Steps of an answer's choices that a slow client may leave unread. Beyond that, choices wait, and
their steps become longer."""


class Endpoints:
    """The endpoints of all pools.

    Args:
        pools: must have distinct names; requests that name no model go to the first.
    """

    def __init__(self, pools: Sequence[ServedPool]) -> None:
        self._pools = pools
        self._by_name = {name: pool for pool in pools for name in pool.names}

    async def completion(self, body: object) -> GenerationJob:
        """Checks a request to /v1/completions. Raises ApiError."""
        request = parse_body(body, CompletionRequest)
        return await self._asked(request).completion(request)

    async def chat(self, body: object) -> GenerationJob:
        """Checks a request to /v1/chat/completions. Raises ApiError."""
        request = parse_body(body, ChatRequest)
        return await self._asked(request).chat(request)

    async def whole(self, job: GenerationJob) -> dict[str, Any]:
        """The answer as one object; raises the errors of `Generator.stream`, in a group."""
        async with asyncio.TaskGroup() as tasks:
            choices = [tasks.create_task(collect(steps)) for steps in job.pool.choices(job)]
        steps = [choice.result() for choice in choices]
        return job.form.whole(steps, _usage(job, sum(len(step.tokens) for step in steps)))

    async def stream(
        self, job: GenerationJob, write: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Writes the answer chunk by chunk, as it is generated; errors as of `whole`."""
        steps: asyncio.Queue[tuple[int, Step]] = asyncio.Queue(_STREAM_AHEAD)
        unopened = set(range(job.num_choices))
        num_open, num_tokens = job.num_choices, 0
        async with asyncio.TaskGroup() as tasks:
            for index, choice in enumerate(job.pool.choices(job)):
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
        if job.wants_usage:
            await write(job.form.usage_chunk(_usage(job, num_tokens)))

    def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [m for pool in self._pools for m in pool.describe()]}

    def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME. Raises ApiError."""
        return self._pool(name).describe_model(name)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether each pool can answer, possibly after waking; and the body of GET /health."""
        waiting = ", ".join(pool.model for pool in self._pools if not self._is_up(pool))
        engines: dict[str, Any] = {}
        for pool in self._pools:
            engines |= pool.generator.engines()
        body = {
            "status": f"no engine serves {waiting}" if waiting else "ok",
            "engines": engines,
            "generations": sum(pool.generator.num_open for pool in self._pools),
        }
        return not waiting, body

    # -- private -------------------------------------------------------------------------

    def _asked(self, request: SamplingRequest) -> ServedPool:
        return self._pools[0] if request.model is None else self._pool(request.model)

    def _pool(self, name: str) -> ServedPool:
        pool = self._by_name.get(name)
        if pool is None:
            known = ", ".join(repr(model["id"]) for model in self.models()["data"])
            raise ApiError(
                404,
                f"there is no model {name!r} here; there are: {known}",
                param="model",
                code="model_not_found",
            )
        return pool

    def _is_up(self, pool: ServedPool) -> bool:
        """Whether a pool can answer.

        An engine that dies while its pool sleeps is restarted when the pool wakes, so pools that
        share GPUs count as one.
        """
        if not pool.is_time_sliced:
            return pool.has_engine
        time_sliced = [other for other in self._pools if other.is_time_sliced]
        return pool.has_started and any(other.has_engine for other in time_sliced)


async def _feed(
    steps: asyncio.Queue[tuple[int, Step]], index: int, choice: AsyncGenerator[Step, None]
) -> None:
    async with aclosing(choice):
        async for step in choice:
            await steps.put((index, step))


def _usage(job: GenerationJob, num_tokens: int) -> dict[str, int]:
    return usage_of(sum(map(len, job.prompts)), num_tokens)
