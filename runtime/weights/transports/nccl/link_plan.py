"""NCCL, the supervisor's part: where each rank meets each engine. Torch-free."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.base import (
    Layout,
    ProbedEngine,
    Problem,
    RankOffer,
    TransportName,
)
from umbra.runtime.weights.transports.nccl.reported_progress import ReportedProgress
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid


class LinkPlan:
    """Works between any nodes that reach rank 0's."""

    name: TransportName = "nccl"
    reads_exports = False
    connects = True

    async def find_problem(
        self, offers: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        if not offers[0].store:
            return Problem("rank 0 offers no store in which process groups could meet")
        return None

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
        return Layout(
            details={
                "store": offers[0].store,
                "key": secrets.token_hex(4),
                "progress": {"num_ranks": len(offers), "num_engines": num_engines},
            },
            engine_details={},
            progress=ReportedProgress(len(offers), num_engines),
            num_buckets=BucketGrid(manifest.nbytes, bucket_nbytes).num_buckets,
        )
