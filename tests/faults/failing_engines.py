"""Engines that fail as a whole, at several points of their lifecycle."""

from __future__ import annotations

import os

from umbra.engines.echo.echo_engine import EchoEngine


class DiesInSync(EchoEngine):
    """Starts, and ends its process whenever it gets weights: a crash in a loop."""

    async def load(self) -> dict[str, int]:
        os._exit(6)
