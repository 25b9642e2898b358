from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.sync_calls import SyncGrant, remaining_s
from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.mapped_image import KeptImage, MappedImage
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


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
