"""The images of weights of a pool whose nodes are all in one process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.pools.sync_coordinator import SyncCoordinator
from umbra.runtime.weights.image.fd_server import FdServer
from umbra.runtime.weights.image.image_memory import ImageOrder, NodeImages
from umbra.runtime.weights.sync_messages import SyncAnswer, SyncCall, SyncReport


class LocalImages:
    """Those of every node. `close` frees them."""

    def __init__(self, server: FdServer) -> None:
        self._server = server
        self._nodes: dict[str, NodeImages] = {}

    @asynccontextmanager
    async def hold(
        self, node_id: str, order: ImageOrder
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        node = self._nodes.setdefault(node_id, NodeImages(self._server))
        async with aclosing(node.hold(order)) as states:
            yield states

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()


class StrictCoordinator(SyncCoordinator):
    """Fails ranks whose version has reached no engine, although some took part."""

    async def answer(self, message: SyncCall) -> SyncAnswer:
        answer = await super().answer(message)
        if isinstance(answer, SyncReport) and answer.failed and not answer.engines:
            raise WeightSyncError(
                f"no engine is left for version {answer.version}: {answer.failed}"
            )
        return answer
