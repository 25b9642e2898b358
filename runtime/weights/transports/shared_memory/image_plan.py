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
from umbra.runtime.weights.transports.shared_memory.image_memory import ImageMemory, numbered


class ImagePlan:
    """Shared memory, the supervisor's part: one image, which works on any node. Torch-free."""

    name: TransportName = "memfd"
    connects = False

    def __init__(self, memory: ImageMemory) -> None:
        self._memory = memory

    async def find_problem(
        self, offers: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        return find_distance(offers, engines)

    def can_reach(self, engine: ProbedEngine) -> bool:
        return True

    @asynccontextmanager
    async def lay_out(self, order: LayoutOrder) -> AsyncGenerator[Layout]:
        grid = BucketGrid(order.manifest.nbytes, order.bucket_nbytes)
        numbers = len(order.offers), len(order.engines)
        async with self._memory.opened(grid, *numbers) as (details, progress):
            yield Layout(
                rank_details=lambda rank: details,
                engine_details=numbered(details, len(order.engines)),
                progress=progress,
                num_buckets=grid.num_buckets,
            )
