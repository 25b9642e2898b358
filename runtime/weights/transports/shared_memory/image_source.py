"""The image of one sync as an engine's process gets it. Torch-free, unless the engine receives for
its node."""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.mapped_image import KeptImage
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

if TYPE_CHECKING:
    from umbra.runtime.weights.transports.nccl.node_receiver import NodeReceiver


class ImageSource:
    """Owns this engine's side of the control block, and the links if it receives for its node.

    Args:
        kept: holds the mapping of the image.
        image_nbytes: of the manifest.
        wire: the arguments of prepare_update.
        timeout_s: limit for the supervisor to pass the memory.

    Raises:
        ConnectionLost, DeadlineExceeded, WeightSyncError: the supervisor does not pass it.
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
        self._end_of_sync = EngineEnd(wire, timeout_s)
        self._receiver: NodeReceiver | None = None
        if "receives" not in wire:
            return
        # It imports torch, which some engines otherwise do without.
        from umbra.runtime.weights.transports.nccl import node_receiver

        try:
            self._receiver = node_receiver.NodeReceiver(
                self.image, self._grid, wire, timeout_s, self._end_of_sync.stop
            )
        except BaseException:
            self._end_of_sync.close()
            raise

    @property
    def memory(self) -> mmap.mmap:
        return self.image.memory

    def buckets(self, *, for_gpu: bool = False) -> Iterator[tuple[int, slice]]:
        """Yields every bucket once all ranks have filled it: its index and its bytes in the image.

        Args:
            for_gpu: a GPU copies from it.

        Raises:
            WeightSyncError: the sync was aborted, its time is over, or `stop` was called.
        """
        with self.receiving():
            for idx in self._end_of_sync.buckets(self._grid.num_buckets):
                window = self._grid.window(idx)
                self.image.make_present(window, for_gpu=for_gpu and self._grid.fits_pieces)
                yield idx, window

    def set_loaded(self, num_buckets: int) -> None:
        """Notes that this many buckets were loaded."""
        self._end_of_sync.set_loaded(num_buckets)

    @contextmanager
    def receiving(self) -> Generator[None]:
        """Begins to fill the image with what ranks of other nodes hold, if this engine receives for
        its node. Fails inside the block, if that fails: then all who wait for the image in this
        engine stop.

        Raises:
            WeightSyncError: why nothing more is received, in place of what was raised inside.
        """
        if self._receiver is not None:
            self._receiver.start()
        try:
            yield
        except Exception as error:
            if self._receiver is not None and self._receiver.error:
                raise WeightSyncError(self._receiver.error) from error
            raise

    def stop(self) -> None:
        """Ends waits for ranks within 50 ms, in every process of the engine. From any thread."""
        self._end_of_sync.stop()

    def close(self) -> None:
        """Leaves the sync. When it returns, this engine writes nothing to the image any more.
        Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        self._end_of_sync.close()
