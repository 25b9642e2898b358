"""`umbra dash RUN_DIR`: serves a web page about a run, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Self, cast, get_args

from aiohttp import web

from umbra.runtime.dash.run_view import RunView
from umbra.runtime.dash.sample_texts import Order
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.http_listening import is_own_name, listen, own_names, url_of
from umbra.runtime.process.signal_handling import handle_signals

logger = logging.getLogger(__name__)

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    "index.html": "text/html",
    "dash.css": "text/css",
    "dash.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "uPlot.min.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(arguments: argparse.Namespace) -> int:
    asyncio.run(_serve(Path(arguments.run_dir), arguments.host, arguments.port))
    return 0


async def _serve(run_dir: Path, host: str, port: int) -> None:
    # The server logs its own failures; aiohttp would log a traceback for each malformed request.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    ended = asyncio.Event()
    handle_signals((signal.SIGINT, signal.SIGTERM), lambda _: ended.set())
    view = RunView(run_dir)
    async with DashServer(view, host, port) as server, asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(view.read_ahead())
        print(f"{run_dir}: {server.url} (Ctrl-C ends it)", flush=True)
        await ended.wait()
        reading.cancel()


class DashServer:
    """The HTTP server of one run's page: answers GET only, with the page's files and with JSON.
    Owns the listening socket; port 0 takes a free one. ConfigError on entry if it cannot be bound.
    """

    def __init__(self, view: RunView, host: str, port: int) -> None:
        self._view = view
        self._host = host
        self._port = port
        self._files = {name: (_STATIC / name).read_bytes() for name in _TYPES}
        self._names = own_names(host)
        self._stack = contextlib.AsyncExitStack()

    @property
    def url(self) -> str:
        return f"{url_of(self._host, self._port)}/"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/api/state", self._state),
                web.get("/api/metrics", self._metrics),
                web.get("/api/events", self._events),
                web.get("/api/evaluations", self._evaluations),
                web.get("/api/samples", self._samples),
                web.get("/api/sample/{sample_id:.+}", self._sample),
                web.get("/{name:[A-Za-z.]*}", self._file),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            remedy = "choose others with --host and --port"
            _, self._port = await listen(runner, self._host, self._port, remedy)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses foreign names, converts errors to JSON, and adds the headers."""
        try:
            if not is_own_name(request.headers.get("Host"), self._names):
                names = ", ".join(sorted(self._names))
                raise web.HTTPForbidden(reason=f"open this page by its address, or as {names}")
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, error.reason)
        except UmbraError as error:
            response = _error(404 if isinstance(error, ConfigError) else 500, str(error))
        except OSError as error:  # of a file, which may be readable at the next request
            response = _error(500, f"cannot use {error.filename}: {error.strerror}")
        except Exception:  # the page shows that an answer failed, and continues
            logger.exception("%s", request.path)
            response = _error(500, "internal error; see the output of umbra dash")
        response.headers.update(_HEADERS)
        return response

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"] or "index.html"
        if name not in self._files:
            raise web.HTTPNotFound(reason=f"there is no {name}")
        return web.Response(body=self._files[name], content_type=_TYPES[name], charset="utf-8")

    async def _state(self, request: web.Request) -> web.Response:
        del request
        return _json(await self._view.state())

    async def _metrics(self, request: web.Request) -> web.Response:
        return _json(await self._view.metrics(_number(request.query, "from") or 0))

    async def _events(self, request: web.Request) -> web.Response:
        return _json(await self._view.events(_number(request.query, "from") or 0))

    async def _evaluations(self, request: web.Request) -> web.Response:
        return _json(await self._view.evaluations(_number(request.query, "from") or 0))

    async def _samples(self, request: web.Request) -> web.Response:
        order = request.query.get("order", "newest")
        if order not in get_args(Order):
            raise web.HTTPBadRequest(reason=f"order is one of {', '.join(get_args(Order))}")
        step = _number(request.query, "step")
        return _json(await self._view.samples(cast("Order", order), step))

    async def _sample(self, request: web.Request) -> web.Response:
        return _json(await self._view.sample(request.match_info["sample_id"]))


def _number(query: Mapping[str, str], key: str) -> int | None:
    text = query.get(key)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise web.HTTPBadRequest(reason=f"{key} is a whole number")
    return int(text)


def _json(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.Response(
        text=json.dumps({"error": message}), status=status, content_type="application/json"
    )
