"""Shared memory, a rank's part: copies its shards into shared buckets.

rank 0  fill 0 | fill 1 | wait | fill 2 ...      each rank fills its own bytes of a bucket,
rank 1  fill 0 | fill 1 | wait | fill 2 ...      no rank sees another's
engine         | load 0        | load 1 ...      with two buffers; bucket i + 2 reuses that of i
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from umbra.runtime.weights.sync_calls import Region, SyncGrant
from umbra.runtime.weights.transports.shard_reader import RankShards, ShardBuckets
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketPiece
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings
from umbra.runtime.weights.transports.shared_memory.ring_filler import RingFiller


class RingSender:
    """Keeps the buckets mapped until `close`.

    Args:
        check: called while the rank waits for buckets; raises if the job is lost.
    """

    is_read_by_engines = False

    def __init__(self, shards: RankShards, check: Callable[[], None]) -> None:
        self._shards = shards
        self._check = check
        self._mappings = BucketMappings()
        self._buckets = ShardBuckets(shards)

    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Fills all buckets; see `Sender.send`."""
        plan, rank = self._buckets.cut(grant), self._shards.rank
        ring = RingFiller.open(rank, grant.details, grant.bucket_nbytes, self._mappings, deadline)
        if ring is None:
            return None
        try:
            return self._fill_buckets(plan, ring, grant.has_checksums)
        finally:
            ring.close()

    def close(self) -> None:
        self._mappings.close()

    @torch.no_grad()
    def _fill_buckets(
        self, plan: list[list[BucketPiece]], ring: RingFiller, has_checksums: bool
    ) -> list[Region] | None:
        reader = self._shards.reader()
        regions: list[Region] = []
        for idx, pieces in enumerate(plan):
            memory = ring.wait(idx, self._check)
            if memory is None:
                return None
            regions += reader.read_bucket(pieces, memory, has_checksums)
            ring.set_filled(idx)
        return regions
