"""Shared memory, the supervisor's part: a ring of buckets, which works on any node. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.base import (
    Layout,
    ProbedEngine,
    Problem,
    RankOffer,
    TransportName,
    find_distance,
)
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.sync_memory import SyncMemory


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

    def lay_out(
        self,
        manifest: Manifest,
        bucket_nbytes: int,
        offers: Sequence[RankOffer],
        num_engines: int,
        *,
        has_checksums: bool,
    ) -> Layout:
        names = self._memory.names()
        details, progress = self._memory.open_progress(len(offers), num_engines)
        return Layout(
            details={"names": names, **details},
            engine_details={},
            progress=progress,
            num_buckets=BucketGrid(manifest.nbytes, bucket_nbytes).num_buckets,
        )
