"""The HTTP front of all pools: an actor that speaks the OpenAI API outside and umbra's own inside.

    client ──HTTP──▶ HttpFront ──▶ Endpoints ──▶ ServedPool ──▶ the pool's engines, of any kind

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
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from typing import Any, Final, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic_core import from_json

from umbra.runtime.actor.actor_spec import actor_context, idempotent
from umbra.runtime.errors import ConfigError, first_leaf
from umbra.runtime.rollout.operator_messages import OperatorMessages
from umbra.runtime.settings import from_wire
from umbra.trainer.serving.api_error import ApiError, as_api_error
from umbra.trainer.serving.endpoints import Endpoints
from umbra.trainer.serving.served_pool import GenerationJob, ServedPool, ServedPoolConfig

logger = logging.getLogger(__name__)

_MAX_BODY_NBYTES: Final = 8 << 20
"""Hundreds of prompts at once. The event loop does nothing else while it parses one."""
_MAX_HELD_NBYTES: Final = 512 << 20
"""Of the bodies of all requests under way. More memory is never asked for by waiting requests; less
would refuse what an evaluation harness sends at once."""
_SHUTDOWN_S: Final = 1.0
"""For answers under way when the server ends to tell their clients. Below the actor's grace."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """Serves some pools. An actor; owns the listening socket.

    Args:
        pools: `ServedPoolConfig` as plain values; who names no model gets the first.
        port: 0 takes a free one.
        api_key: what clients must know; "" lets everybody in.
    """

    def __init__(
        self, *, pools: list[dict[str, Any]], host: str, port: int, api_key: str = ""
    ) -> None:
        context = actor_context()
        self._notes = OperatorMessages(context.supervisor)
        self._pools = [
            ServedPool(from_wire(ServedPoolConfig, pool), context, self._notes.put)
            for pool in pools
        ]
        self._endpoints = Endpoints(self._pools)
        self._api_key = api_key
        self._place: tuple[str, int] = (host, port)
        self._stack = contextlib.AsyncExitStack()
        self._is_ending = False
        self._under_way: set[asyncio.Timeout] = set()  # answers
        self._held_nbytes = 0  # of bodies

    async def __aenter__(self) -> Self:
        logging.getLogger("aiohttp.server").addFilter(_is_worth_logging)
        async with contextlib.AsyncExitStack() as stack:
            for pool in self._pools:
                await stack.enter_async_context(pool.text)
            app = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY_NBYTES)
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
                access_log=None,
                auto_decompress=False,  # on the event loop, and of GiB that a client packs into MiB
            )
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            await _listen(runner, *self._place)
            bound: Any = runner.addresses[0]
            self._place = (bound[0], bound[1])
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_ending = True
        now = asyncio.get_running_loop().time()
        for answer in self._under_way:
            answer.reschedule(now)
        await self._stack.aclose()

    async def run(self) -> None:
        """Lives until the actor is stopped or a pool is lost from sight."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._notes.run())
            for pool in self._pools:
                tasks.create_task(pool.generator.run())

    @idempotent
    def address(self) -> list[Any]:
        """[host, port] that it listens on."""
        return list(self._place)

    # -- HTTP ----------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets in who may come in; every error leaves in the API's form."""
        try:
            self._check_key(request)
            return await handler(request)
        except web.HTTPException as error:
            reason = f"{request.method} {request.path}: {error.reason}"
            return _error_response(ApiError(error.status, reason))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the client is to be answered
            # No local variable has the error: frame and traceback would keep each other, and with
            # them what the request had, until the garbage collector comes by.
            return _error_response(_told(error))

    def _check_key(self, request: web.Request) -> None:
        if not self._api_key or request.path == "/health":
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # aiohttp keeps bytes that are no UTF-8 as lone surrogates, as Python does with arguments
        if not hmac.compare_digest(os.fsencode(given), os.fsencode(self._api_key)):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _health(self, request: web.Request) -> web.Response:
        del request
        is_up, body = self._endpoints.health()
        return web.json_response(body, status=200 if is_up else 503)

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response(self._endpoints.models())

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(self._endpoints.model(request.match_info["name"]))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, self._endpoints.completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, self._endpoints.chat)

    async def _respond(
        self, request: web.Request, check: Callable[[object], Awaitable[GenerationJob]]
    ) -> web.StreamResponse:
        with self._holding(await _body(request)) as body:
            async with self._until_the_end():
                job = await check(_parsed(body))
            return await self._answer(request, job)

    @contextlib.contextmanager
    def _holding(self, body: bytes) -> Generator[bytes]:
        """A request is under way within. Raises ApiError where those that are take too much."""
        if self._held_nbytes + len(body) > _MAX_HELD_NBYTES:
            raise ApiError(
                429,
                f"a request of {len(body)} bytes is too large now: those under way have "
                f"{self._held_nbytes} of at most {_MAX_HELD_NBYTES}; try again later",
            )
        self._held_nbytes += len(body)
        try:
            yield body
        finally:
            self._held_nbytes -= len(body)

    async def _answer(self, request: web.Request, job: GenerationJob) -> web.StreamResponse:
        if not job.is_stream:
            async with self._until_the_end():
                answer = await self._endpoints.whole(job)
            return web.json_response(answer)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

        async def write(chunk: dict[str, Any]) -> None:
            if not response.prepared:  # not before there is something: it may be an error
                await response.prepare(request)
            await response.write(_event(chunk))

        try:
            async with self._until_the_end():
                await self._endpoints.stream(job, write)
            await response.write(b"data: [DONE]\n\n")
        except Exception as error:  # the status may be sent: then the stream itself has to tell
            if isinstance(first_leaf(error), ConnectionError):
                logger.info("a client went away")
                return response
            if not response.prepared:
                raise
            await response.write(_event(_told(error).body))
        return response

    @contextlib.asynccontextmanager
    async def _until_the_end(self) -> AsyncGenerator[None]:
        """A part of an answer is made within. Raises ApiError where the server ends before that."""
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


def _told(error: Exception) -> ApiError:
    """What the client learns of an error."""
    told = as_api_error(first_leaf(error))
    if told is None:
        logger.error("a request failed", exc_info=error)
        return ApiError(500, "an error of the server's own; see its log")
    return told


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Whoever sends what is no HTTP is told so; a stack trace for each would fill the disk."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose others with --host "
            "and --port"
        ) from error


async def _body(request: web.Request) -> bytes:
    # Also what keeps a web page that its user visits from sending requests here unasked.
    if request.content_type != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"the body's Content-Encoding is {encoding!r}: send it uncompressed")
    return await request.read()


def _parsed(body: bytes) -> object:
    gc.disable()  # millions of small lists would set it off again and again: 1 s for 8 MiB of them
    try:
        # Unlike json.loads, it refuses lone surrogates, and what is nested too deep to be shown.
        return from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    finally:
        gc.enable()


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
