"""The rings of buckets that a node holds for syncs between nodes, one for each sync.

    coordinator ── hold_ring ──────────▶ supervisor of a node    how far the ring is comes back
                ── dismiss_from_ring ──▶                         an engine of the node is lost

A ring belongs to its node's supervisor, which lives longer than any of the engines that use it: it
makes those that wait stop, whoever of them was killed or is stopped. Torch-free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.weights.transports.shared_memory.memfd import FdServer
from umbra.runtime.weights.transports.shared_memory.sync_memory import SyncMemory
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress

_LOOK_INTERVAL_S: Final = 0.25
# Time between two looks at a control block, which tells nobody on an event loop that it has
# changed. A shorter one costs the supervisor of rank 0's node a message from each node; with a
# longer one, engines that stand still are noticed later.


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOrder:
    """A ring for one sync.

    Attributes:
        key: its name, which is never used again.
        num_engines: of this node.
    """

    key: str
    bucket_nbytes: int
    num_ranks: int
    num_engines: int


class NodeRings:
    """Owned by the supervisor. Each ring has memory of its own, so that what is late in one sync
    cannot write into the next.

    Args:
        fd_server: offers the descriptors to processes of this node.
    """

    def __init__(self, fd_server: FdServer) -> None:
        self._fd_server = fd_server
        self._held: dict[str, SyncProgress] = {}

    async def hold(self, order: RingOrder) -> AsyncGenerator[dict[str, Any], None]:
        """Makes a ring, which lives as long as this generator. Its end makes everybody stop who
        waits in the ring.

        Yields:
            First what processes of this node need to map the ring. Then, whenever it has changed,
            {"filled": buckets that every rank has filled, "loaded": [buckets of each engine, ...]}.

        Raises:
            WeightSyncError: the system has no memory or descriptors for it.
        """
        memory = SyncMemory(order.key, order.bucket_nbytes, self._fd_server)
        try:
            await memory.make()
            names = memory.names()
            with memory.progress(order.num_ranks, order.num_engines) as (wire, progress):
                self._held[order.key] = progress
                try:
                    yield {"names": names, **wire}
                    async for state in _changes(progress, order.num_engines):
                        yield state
                finally:
                    del self._held[order.key]
                    progress.abort()
        finally:
            memory.close()

    def dismiss(self, key: str, engine: int) -> None:
        """Makes nobody wait for this engine any more. No effect if the ring is gone."""
        if key in self._held:
            self._held[key].dismiss(engine)


async def _changes(
    progress: SyncProgress, num_engines: int
) -> AsyncGenerator[dict[str, Any], None]:
    last: dict[str, Any] = {}
    while True:
        state = {
            "filled": min(progress.num_filled()),
            "loaded": [progress.num_loaded(engine) for engine in range(num_engines)],
        }
        if state != last:
            yield state
            last = state
        await asyncio.sleep(_LOOK_INTERVAL_S)
