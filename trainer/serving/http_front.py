"""The HTTP front of all pools: an actor that serves the OpenAI API and calls umbra's engines.

    client ──HTTP──▶ HttpFront ──▶ ServedPool ──▶ the pool's engines, of any kind

A client that disconnects cancels the handler of its request, and with it its generations.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic_core import from_json

from umbra.runtime.actor.actor_spec import actor_context, idempotent
from umbra.runtime.errors import first_leaf
from umbra.runtime.http_listening import is_own_name, listen, own_names
from umbra.runtime.rollout.dispatch.generator import OperatorMessages
from umbra.runtime.settings import from_wire
from umbra.trainer.serving.choice import Step, collect
from umbra.trainer.serving.openai_messages import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    RequestBodies,
    SamplingRequest,
    as_api_error,
    parse_body,
    usage_of,
)
from umbra.trainer.serving.served_pool import GenerationJob, ServedPool, ServedPoolConfig

logger = logging.getLogger(__name__)

_MAX_BODY_NBYTES: Final = 8 << 20
"""Size limit of one body: hundreds of prompts. The event loop is blocked while it parses one."""
_MAX_HELD_NBYTES: Final = 512 << 20
"""Size limit of all bodies in progress. A higher one takes memory for waiting requests; a lower one
refuses what an evaluation harness sends at once."""
_BODY_S: Final = 60.0
"""Time for a body to arrive. Less refuses clients with slow networks; more lets clients that stop
in the middle hold the memory of others."""
_IDLE_S: Final = 120.0
"""Time for the head of a request, from the connection or the last answer. Less than a proxy keeps
idle connections, often 60 s, fails requests; more lets silent clients hold descriptors."""
_ABORT_S: Final = 10.0
"""Time for the answers in progress to end with an error when the server ends. A thousand take a
second or two on an idle machine. With `_SHUTDOWN_S` it is below the actor's grace."""
_SHUTDOWN_S: Final = 1.0
"""Time for the last bytes to reach their clients."""
_STREAM_AHEAD: Final = 16
"""Steps of an answer's choices that a slow client may leave unread. Beyond that, choices wait, and
their steps become longer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """Serves some pools. An actor; owns the listening socket. `pools` are `ServedPoolConfig` as
    plain values; requests that name no model go to the first. `port` 0 is any free port; clients
    must send `api_key` unless it is ""."""

    def __init__(
        self, *, pools: list[dict[str, Any]], host: str, port: int, api_key: str = ""
    ) -> None:
        context = actor_context()
        self._operator_messages = OperatorMessages(context)
        self._pools = [
            ServedPool(from_wire(ServedPoolConfig, pool), context, self._operator_messages.put)
            for pool in pools
        ]
        self._by_name = {name: pool for pool in self._pools for name in pool.names}
        self._api_key = api_key
        self._names = own_names(host)
        self._address: tuple[str, int] = (host, port)
        self._stack = contextlib.AsyncExitStack()
        self._is_ending = False
        self._under_way: set[asyncio.Timeout] = set()  # deadlines of answers in progress
        self._num_requests = 0
        self._all_answered = asyncio.Event()  # set while there is no request
        self._all_answered.set()
        self._bodies = RequestBodies(
            max_nbytes=_MAX_BODY_NBYTES, max_held_nbytes=_MAX_HELD_NBYTES, limit_s=_BODY_S
        )

    async def __aenter__(self) -> Self:
        logging.getLogger("aiohttp.server").addFilter(_is_worth_logging)
        async with contextlib.AsyncExitStack() as stack:
            for pool in self._pools:
                await stack.enter_async_context(pool.text)
            app = web.Application(middlewares=[self._guard])
            app.add_routes(
                [
                    web.get("/health", self._health),
                    web.get("/v1/models", self._models),
                    web.get("/v1/models/{name:.+}", self._model),
                    web.post("/v1/completions", self._completions),
                    web.post("/v1/chat/completions", self._chat),
                ]
            )
            runner = web.AppRunner(
                app,
                handler_cancellation=True,
                shutdown_timeout=_SHUTDOWN_S,
                keepalive_timeout=_IDLE_S,
                access_log=None,
                auto_decompress=False,  # it would block the event loop, with GiB from a few MiB
            )
            stack.push_async_callback(runner.cleanup)
            remedy = "choose others with --host and --port"
            self._address = await listen(runner, *self._address, remedy)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_ending = True
        now = asyncio.get_running_loop().time()
        for answer in self._under_way:
            answer.reschedule(now)
        # The server listens meanwhile: it refuses new connections and those not yet accepted.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._all_answered.wait()
        await self._stack.aclose()

    async def run(self) -> None:
        """Runs until the actor is stopped or a pool's states are lost."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._operator_messages.run())
            for pool in self._pools:
                tasks.create_task(pool.generator.run())

    @idempotent
    def address(self) -> list[Any]:
        """[host, port] of the listening socket."""
        return list(self._address)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._num_requests += 1
        self._all_answered.clear()
        try:
            self._check_client(request)
            return await handler(request)
        except web.HTTPException as error:
            reason = f"{request.method} {request.path}: {error.reason}"
            return _error_response(ApiError(error.status, reason))
        except Exception as error:  # noqa: BLE001 -- the client must get an answer for any error
            # The error must not be in a local variable: frame and traceback would keep each other,
            # and with them the request's data, until the garbage collector runs.
            return _error_response(_client_error(error))
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._all_answered.set()

    def _check_client(self, request: web.Request) -> None:
        """Raises ApiError for a wrong key. Without a key, keeps out web pages, which a visitor's
        browser would let through if their name meant this address."""
        if not self._api_key:
            host = request.headers.get("Host")
            if not is_own_name(host, self._names):
                raise ApiError(
                    403,
                    f"this server is not called {host!r}: use its address, or "
                    f"{', '.join(sorted(self._names))}, or start it with --api-key",
                )
            return
        if request.path == "/health":
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # aiohttp decodes bytes that are not UTF-8 as lone surrogates, like Python's arguments.
        if not hmac.compare_digest(os.fsencode(given), os.fsencode(self._api_key)):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _health(self, request: web.Request) -> web.Response:
        """Status 200 if each pool can answer, possibly after waking."""
        del request
        waiting = ", ".join(pool.model for pool in self._pools if not self._is_up(pool))
        engines: dict[str, Any] = {}
        for pool in self._pools:
            engines |= pool.generator.engines()
        body = {
            "status": f"no engine serves {waiting}" if waiting else "ok",
            "engines": engines,
            "generations": sum(pool.generator.num_open for pool in self._pools),
        }
        return web.json_response(body, status=503 if waiting else 200)

    async def _models(self, request: web.Request) -> web.Response:
        del request
        models = [model for pool in self._pools for model in pool.describe()]
        return web.json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(self._pool(name).describe_model(name))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        async def check(body: object) -> GenerationJob:
            asked = parse_body(body, CompletionRequest)
            return await self._asked(asked).completion(asked)

        return await self._respond(request, check)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def check(body: object) -> GenerationJob:
            asked = parse_body(body, ChatRequest)
            return await self._asked(asked).chat(asked)

        return await self._respond(request, check)

    def _asked(self, request: SamplingRequest) -> ServedPool:
        return self._pools[0] if request.model is None else self._pool(request.model)

    def _pool(self, name: str) -> ServedPool:
        pool = self._by_name.get(name)
        if pool is None:
            known = ", ".join(
                repr(model["id"]) for pool in self._pools for model in pool.describe()
            )
            raise ApiError(
                404,
                f"there is no model {name!r} here; there are: {known}",
                param="model",
                code="model_not_found",
            )
        return pool

    def _is_up(self, pool: ServedPool) -> bool:
        """Whether a pool can answer. An engine that dies while its pool sleeps is restarted when
        the pool wakes, so pools that share GPUs count as one."""
        if not pool.is_time_sliced:
            return pool.has_engine
        time_sliced = [other for other in self._pools if other.is_time_sliced]
        return pool.has_started and any(other.has_engine for other in time_sliced)

    async def _respond(
        self, request: web.Request, check: Callable[[object], Awaitable[GenerationJob]]
    ) -> web.StreamResponse:
        _check_content(request)
        with self._bodies.holding() as body:
            async with self._until_the_end():
                await self._bodies.read(request.content.iter_any(), body)
                job = await check(_parsed(body))
            return await self._answer(request, job)

    async def _answer(self, request: web.Request, job: GenerationJob) -> web.StreamResponse:
        if not job.is_stream:
            async with self._until_the_end():
                answer = await _whole(job)
            return web.json_response(answer)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

        async def write(chunk: dict[str, Any]) -> None:
            if not response.prepared:  # as late as possible: the first result may be an error
                await response.prepare(request)
            await response.write(_event(chunk))

        try:
            async with self._until_the_end():
                await _stream(job, write)
            await response.write(b"data: [DONE]\n\n")
        except Exception as error:  # if the status was sent, the stream itself must report it
            if isinstance(first_leaf(error), ConnectionError):
                logger.info("a client disconnected")
                return response
            if not response.prepared:
                raise
            await response.write(_event(_client_error(error).body))
        return response

    @contextlib.asynccontextmanager
    async def _until_the_end(self) -> AsyncGenerator[None]:
        """Runs a part of an answer. Raises ApiError if the server ends before it is complete."""
        answer = asyncio.timeout(0.0 if self._is_ending else None)
        try:
            async with answer:
                self._under_way.add(answer)
                yield
        except TimeoutError:
            if not answer.expired():
                raise
            raise ApiError(503, "the server is shutting down", code="shutting_down") from None
        finally:
            self._under_way.discard(answer)


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body, status=error.status)


def _client_error(error: Exception) -> ApiError:
    api_error = as_api_error(first_leaf(error))
    if api_error is None:
        logger.error("a request failed", exc_info=error)
        return ApiError(500, "internal error; see the server's log")
    return api_error


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drops stack traces of malformed HTTP, which would fill the disk; the client gets a 400."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _check_content(request: web.Request) -> None:
    # This also keeps web pages from making their visitors' browsers send requests here.
    if request.content_type != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"the body's Content-Encoding is {encoding!r}: send it uncompressed")


def _parsed(body: bytearray) -> object:
    gc.disable()  # millions of small lists would trigger it again and again: 1 s for 8 MiB
    try:
        # Unlike json.loads, it refuses lone surrogates and nesting too deep to print.
        return from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    finally:
        gc.enable()


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def _whole(job: GenerationJob) -> dict[str, Any]:
    """The answer as one object; raises the errors of `Generator.stream`, in a group."""
    async with asyncio.TaskGroup() as tasks:
        choices = [tasks.create_task(collect(steps)) for steps in job.pool.choices(job)]
    steps = [choice.result() for choice in choices]
    return job.form.whole(steps, _usage(job, sum(len(step.tokens) for step in steps)))


async def _stream(job: GenerationJob, write: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Writes the answer chunk by chunk, as it is generated; raises as `_whole` does."""
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


async def _feed(
    steps: asyncio.Queue[tuple[int, Step]], index: int, choice: AsyncGenerator[Step, None]
) -> None:
    async with aclosing(choice):
        async for step in choice:
            await steps.put((index, step))


def _usage(job: GenerationJob, num_tokens: int) -> dict[str, int]:
    return usage_of(sum(map(len, job.prompts)), num_tokens)
