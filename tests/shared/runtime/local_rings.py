"""The rings of weights of a pool whose nodes are all in one process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from umbra.runtime.weights.transports.shared_memory.memfd import FdServer
from umbra.runtime.weights.transports.shared_memory.node_rings import NodeRings, RingOrder


class LocalRings:
    """The rings of every node, all in this process."""

    def __init__(self, server: FdServer) -> None:
        self._rings = NodeRings(server)

    @asynccontextmanager
    async def hold(
        self, node_id: str, order: RingOrder
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        async with aclosing(self._rings.hold(order)) as states:
            yield states

    async def dismiss(self, node_id: str, key: str, engine: int) -> None:
        self._rings.dismiss(key, engine)
