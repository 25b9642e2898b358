"""Shared memory, a rank's part: copies its shards into shared buckets.

rank 0  fill 0 | fill 1 | wait | fill 2 ...      each rank fills its own bytes of a bucket,
rank 1  fill 0 | fill 1 | wait | fill 2 ...      no rank sees another's
engine         | load 0        | load 1 ...      with two buffers; bucket i + 2 reuses that of i
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from umbra.runtime.weights.sync_calls import Region, SyncGrant, remaining_s
from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.shard_reader import RankShards, ShardBuckets
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketPiece
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings, MappedBucket
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


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
        plan, details = self._buckets.cut(grant), grant.details
        left_s, fd_socket = remaining_s(deadline), details["fd_socket"]
        buckets = self._mappings.open(fd_socket, details["names"], grant.bucket_nbytes, left_s)
        progress = SyncProgress.receive_open(fd_socket, details["progress"], left_s)
        if progress is None:
            return None
        try:
            return self._fill_buckets(plan, buckets, progress, grant.has_checksums, deadline)
        finally:
            progress.close()

    def close(self) -> None:
        self._mappings.close()

    @torch.no_grad()
    def _fill_buckets(
        self,
        plan: list[list[BucketPiece]],
        buckets: list[MappedBucket],
        progress: SyncProgress,
        has_checksums: bool,
        deadline: float,
    ) -> list[Region] | None:
        reader = self._shards.reader()
        memories = [buffer_bytes(bucket.memory) for bucket in buckets]
        regions: list[Region] = []
        for idx, pieces in enumerate(plan):
            num_needed = idx + 1 - len(memories)  # then the memory of bucket idx is free again
            if not progress.wait_loaded(num_needed, deadline, self._check):
                return None
            memory = memories[idx % len(memories)]
            for piece in pieces:
                target = memory[piece.bucket_start : piece.bucket_start + piece.nbytes]
                checksum = reader.read_into(piece, target, has_checksums)
                offset = self._shards.extents[piece.key].offset + piece.start
                regions.append((offset, piece.nbytes, checksum))
            progress.set_filled(self._shards.rank, idx + 1)
        return regions
