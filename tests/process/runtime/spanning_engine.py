"""An engine with followers, without a model: it starts a program on each, and sends them images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.engines.shell.engine_follower import FollowerGroup, own_address


class SpanningEngine(EchoEngine):
    """Args:
    program: the followers', a module.
    """

    def __init__(self, *, followers: Sequence[str], program: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._followers = FollowerGroup(followers)
        self._program = program

    async def __aenter__(self) -> Self:
        await self._followers.start(self._program, [{"leader": own_address()}], {"TASK": "follow"})
        return await super().__aenter__()

    async def send_image(self, path: str, nbytes: int) -> list[str]:
        sent = await self._followers.send_image({"path": path, "nbytes": nbytes})
        return sent["paths"]

    async def close_images(self) -> None:
        await self._followers.close_images()
