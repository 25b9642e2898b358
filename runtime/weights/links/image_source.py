from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.image.sync_progress import EngineEnd
from umbra.runtime.weights.manifest import BucketGrid

if TYPE_CHECKING:
    from umbra.runtime.weights.links.weight_links import NodeReceiver


class ImageSource:
    """The image of one sync as an engine's process gets it. Torch-free, unless the engine receives
    for its node. Owns the control block's mapping, and the links if it receives: they fill the
    image from now on.

    Args:
        kept: holds the mapping of the image.
        wire: the arguments of prepare_update.
        timeout_s: limit for the supervisor to pass the memory.
    """

    def __init__(
        self,
        kept: KeptImage,
        image_nbytes: int,
        wire: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self.image = kept.receive(wire, timeout_s)
        self._grid = BucketGrid(image_nbytes, wire["bucket_nbytes"])
        self.end_of_sync = EngineEnd(wire, timeout_s)
        self._receiver: NodeReceiver | None = None
        if "receives" not in wire:
            return
        # Imports torch, which some engines otherwise do without.
        from umbra.runtime.weights.links import weight_links

        try:
            self._receiver = weight_links.NodeReceiver(
                self.image, self._grid, wire, timeout_s, self.end_of_sync.stop
            )
        except BaseException:
            self.end_of_sync.close()
            raise

    @property
    def memory(self) -> mmap.mmap:
        return self.image.memory

    def buckets(self, *, for_gpu: bool = False) -> Iterator[tuple[int, slice]]:
        """Yields every bucket's index and bytes in the image, `for_gpu` to copy from, once all
        ranks have filled it. Raises WeightSyncError if the sync was aborted, its time is over, or
        `end_of_sync` was stopped."""
        with self.receiving():
            for idx in self.end_of_sync.buckets(self._grid.num_buckets):
                window = self._grid.window(idx)
                self.image.make_present(window, for_gpu=for_gpu and self._grid.fits_pieces)
                yield idx, window

    @contextmanager
    def receiving(self) -> Generator[None]:
        """Waits for the image belong into this block. If a link of a receiver fails, all waits in
        this engine stop, and a WeightSyncError with the reason replaces their errors."""
        try:
            yield
        except Exception as error:
            if self._receiver is not None and self._receiver.error:
                raise WeightSyncError(self._receiver.error) from error
            raise

    def close(self) -> None:
        """Leaves the sync, and writes nothing more to the image. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        self.end_of_sync.close()
