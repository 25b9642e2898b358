"""An engine whose later lives take their time to start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

from umbra.engines.echo import EchoEngine
from umbra.runtime.actor import actor_context


class SlowEngine(EchoEngine):
    """Starts at once the first time, and in `start_s` seconds after that.

    Args:
        marker: is made where a later start begins.
    """

    def __init__(self, *, start_s: float, marker: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._start_s = start_s
        self._marker = Path(marker)

    async def __aenter__(self) -> Self:
        if actor_context().num_restarts:
            self._marker.touch()
            await asyncio.sleep(self._start_s)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass
