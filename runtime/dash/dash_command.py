"""`umbra dash RUN_DIR`: serves a web page about a run, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import signal
from pathlib import Path

from umbra.runtime.errors import ConfigError, how_to_install
from umbra.runtime.process.signal_handling import handle_signals


def run(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory: give a job's run.dir")
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(f"umbra dash needs aiohttp: {how_to_install('serve')}")
    asyncio.run(_serve(run_dir, arguments.host, arguments.port))
    return 0


async def _serve(run_dir: Path, host: str, port: int) -> None:
    # The server logs its own failures; aiohttp would log a traceback for each malformed request.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    ended = asyncio.Event()
    handle_signals((signal.SIGINT, signal.SIGTERM), lambda _: ended.set())

    from umbra.runtime.dash.dash_server import DashServer
    from umbra.runtime.dash.run_view import RunView

    view = RunView(run_dir)
    async with DashServer(view, host, port) as server, asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(view.read_ahead())
        print(f"{run_dir}: {server.url} (Ctrl-C ends it)", flush=True)
        await ended.wait()
        reading.cancel()
