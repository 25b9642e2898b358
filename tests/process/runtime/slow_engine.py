"""An engine that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.engine_api.lifecycle import Tag
from umbra.runtime.errors import ConfigError


class SlowEngine(EchoEngine):
    """Starts at once the first time, in `start_s` seconds after that; wakes, ends, and begins and
    gives up an update in others.

    Args:
        marker: is made where a later start begins.
        broken: the name of an engine that cannot start.
    """

    def __init__(
        self,
        *,
        start_s: float = 0.0,
        wake_s: float = 0.0,
        end_s: float = 0.0,
        update_s: float = 0.0,
        marker: str = "",
        broken: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if actor_context().name == broken:
            raise ConfigError("this one cannot start")
        self._start_s = start_s
        self._end_s = end_s
        self._update_s = update_s
        self._wake_s = wake_s
        self._marker = Path(marker)

    async def __aenter__(self) -> Self:
        if actor_context().num_restarts:
            self._marker.touch()
            await asyncio.sleep(self._start_s)
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(self._end_s)
        await super().__aexit__(*exc_info)

    async def _wake(self, tags: Sequence[Tag]) -> None:
        if not self._gate.awake.issuperset(tags):
            await asyncio.sleep(self._wake_s)
        await super()._wake(tags)

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: Mapping[str, Any]
    ) -> None:
        await asyncio.sleep(self._update_s)
        await super().prepare_update(version, manifest, buckets)

    async def abort_update(self) -> None:
        await asyncio.sleep(self._update_s)
        await super().abort_update()
