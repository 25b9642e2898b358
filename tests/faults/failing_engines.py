"""Engines that fail as a whole, at several points of their lifecycle."""

from __future__ import annotations

import os
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine


class DiesAtStart:
    """Ends the process in its constructor, like a driver that aborts."""

    def __init__(self, **settings: Any) -> None:
        print("CUDA driver version is insufficient", flush=True)
        os._exit(5)


class DiesInSync(EchoEngine):
    """Starts, and ends its process whenever it gets weights: a crash in a loop."""

    async def load(self) -> dict[str, int]:
        os._exit(6)
