"""Shared memory, the supervisor's part: a ring of buckets, which works everywhere. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.base import Layout, ProbedEngine, Problem, TransportName
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import Offer
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.sync_memory import SyncMemory


class RingPlan:
    """Args: memory: holds the buckets; the pool's coordinator owns it."""

    name: TransportName = "memfd"
    reads_exports = False

    def __init__(self, memory: SyncMemory) -> None:
        self._memory = memory

    async def find_problem(
        self, offers: Sequence[Offer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        return None

    def can_reach(self, engine: ProbedEngine) -> bool:
        return True

    def lay_out(
        self,
        manifest: Manifest,
        bucket_nbytes: int,
        offers: Sequence[Offer],
        *,
        has_checksums: bool,
    ) -> Layout:
        grid = BucketGrid(manifest.nbytes, bucket_nbytes)
        return Layout(names=self._memory.names(), details={}, num_buckets=grid.num_buckets)
