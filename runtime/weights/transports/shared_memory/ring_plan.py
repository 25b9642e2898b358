"""Shared memory, the supervisor's part: a ring of buckets, which works on any node. Torch-free."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from umbra.runtime.weights.transports.base import (
    Layout,
    LayoutOrder,
    ProbedEngine,
    Problem,
    RankOffer,
    TransportName,
    find_distance,
)
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.sync_memory import SyncMemory, numbered


class RingPlan:
    """Args: memory: holds the buckets; the pool's coordinator owns it."""

    name: TransportName = "memfd"
    reads_exports = False
    connects = False

    def __init__(self, memory: SyncMemory) -> None:
        self._memory = memory

    async def find_problem(
        self, offers: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        return find_distance(offers, engines)

    def can_reach(self, engine: ProbedEngine) -> bool:
        return True

    @asynccontextmanager
    async def lay_out(self, order: LayoutOrder) -> AsyncGenerator[Layout]:
        names = self._memory.names()
        with self._memory.progress(len(order.offers), len(order.engines)) as (wire, progress):
            details = {"names": names, **wire}
            yield Layout(
                rank_details=lambda rank: details,
                engine_details=numbered(details, len(order.engines)),
                progress=progress,
                num_buckets=BucketGrid(order.manifest.nbytes, order.bucket_nbytes).num_buckets,
            )
