"""Shared memory, a rank's part: copies its shards into the image of the node.

rank 0   fill 0 | fill 1 | fill 2 ...      each rank fills its own bytes of a bucket,
rank 1   fill 0 | fill 1 | fill 2 ...      no rank sees another's
engine          | load 0 | load 1 ...      and no rank waits for an engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.image.gpu_copies import GpuCopies, common_device
from umbra.runtime.weights.image.mapped_image import KeptImage, MappedImage
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.manifest import BucketGrid, BucketPiece
from umbra.runtime.weights.shards import SenderParts, ShardBuckets, ShardReader, buffer_bytes
from umbra.runtime.weights.sync_messages import Region, SyncGrant, remaining_s
from umbra.runtime.weights.transport import Sender


class ImageSender(Sender):
    network_nbytes = 0

    def __init__(self, parts: SenderParts) -> None:
        self._shards = parts.shards
        self._image = KeptImage()
        self._buckets = ShardBuckets(parts.shards)

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
        reader = ShardReader(self._shards)
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


class ImageFiller:
    """A rank's side of the image, for one sync. Owns the mapping of the control block only."""

    def __init__(
        self, rank: int, image: MappedImage, grid: BucketGrid, progress: SyncProgress
    ) -> None:
        self._rank = rank
        self._image = image
        self._grid = grid
        self._progress = progress

    @classmethod
    def open(
        cls,
        rank: int,
        details: Mapping[str, Any],
        grant: SyncGrant,
        image_nbytes: int,
        kept: KeptImage,
        deadline: float,
    ) -> Self | None:
        """None if the sync was aborted, so that its memory is no longer offered."""
        left_s = remaining_s(deadline)
        try:
            image = kept.receive(details, left_s)
        except WeightSyncError:
            return None
        wire = details["progress"]
        progress = SyncProgress.receive_open(details["fd_socket"], wire, left_s)
        grid = BucketGrid(image_nbytes, grant.bucket_nbytes)
        return None if progress is None else cls(rank, image, grid, progress)

    def bucket(self, idx: int, *, for_gpu: bool = False) -> Tensor | None:
        """A bucket's memory: uint8 [nbytes], `for_gpu` to copy to. None if aborted."""
        if self._progress.is_aborted:
            return None
        window = self._grid.window(idx)
        self._image.make_present(window, for_gpu=for_gpu and self._grid.fits_pieces)
        return buffer_bytes(self._image.memory)[window]

    def set_filled(self, num_buckets: int) -> None:
        self._progress.set_filled(self._rank, num_buckets)

    def close(self) -> None:
        self._progress.close()
