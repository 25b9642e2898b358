"""Shared memory, a rank's part: copies its shards into the image of the node.

rank 0   fill 0 | fill 1 | fill 2 ...      each rank fills its own bytes of a bucket,
rank 1   fill 0 | fill 1 | fill 2 ...      no rank sees another's
engine          | load 0 | load 1 ...      and no rank waits for an engine
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from umbra.runtime.weights.sync_calls import Region, SyncGrant
from umbra.runtime.weights.transports.shard_reader import RankShards, ShardBuckets
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketPiece
from umbra.runtime.weights.transports.shared_memory.gpu_copies import GpuCopies, common_device
from umbra.runtime.weights.transports.shared_memory.image_filler import ImageFiller
from umbra.runtime.weights.transports.shared_memory.mapped_image import KeptImage


class ImageSender:
    is_read_by_engines = False
    network_nbytes = 0

    def __init__(self, shards: RankShards) -> None:
        self._shards = shards
        self._image = KeptImage()
        self._buckets = ShardBuckets(shards)

    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        plan, rank = self._buckets.cut(grant), self._shards.rank
        nbytes = self._shards.manifest.nbytes
        filler = ImageFiller.open(rank, grant.details, grant, nbytes, self._image, deadline)
        if filler is None:
            return None
        try:
            return self._fill_buckets(plan, filler, grant.has_checksums)
        finally:
            filler.close()

    def close(self) -> None:
        self._image.close()

    @torch.no_grad()
    def _fill_buckets(
        self, plan: Sequence[Sequence[BucketPiece]], filler: ImageFiller, has_checksums: bool
    ) -> list[Region] | None:
        reader = self._shards.reader()
        regions: list[Region] = []
        device = common_device(source.tensor for source in self._shards.sources)
        copies = GpuCopies(device, filler.set_filled)
        for idx, pieces in enumerate(plan):
            memory = filler.bucket(idx, for_gpu=copies.is_on_gpu)
            if memory is None:
                return None
            regions += reader.read_bucket(pieces, memory, has_checksums, waits=not copies.is_on_gpu)
            copies.mark(idx + 1)
        copies.wait()
        return regions
