"""Serves the state of a job over HTTP for Prometheus, read again for each request.

aiohttp takes long to import, so the supervisor imports this module when it is asked to serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from umbra.runtime.errors import ConfigError
from umbra.runtime.job_state import JobState
from umbra.runtime.prometheus_text import CONTENT_TYPE, exposition
from umbra.runtime.settings import split_address
from umbra.runtime.step_metrics import last_steps


class MetricsEndpoint:
    """Owns the listening socket, from `open` to `close`; port 0 takes a free one."""

    def __init__(
        self, address: str, run_dir: Path, read_state: Callable[[], Awaitable[JobState]]
    ) -> None:
        self.address = address
        self.url = ""
        self._run_dir = run_dir
        self._read_state = read_state
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Raises ConfigError if it cannot listen there."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        host, port = split_address(self.address)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self.address} ({error.strerror}): set run.metrics_address to "
                "another address of rank 0's host, or to port 0, which takes a free one"
            ) from error
        bound: Any = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.url = f"http://{shown}:{bound[1]}/metrics"
        self._runner = runner

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        steps = await asyncio.to_thread(last_steps, self._run_dir)
        text = exposition(await self._read_state(), steps[-1] if steps else None)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
