from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from umbra.runtime.weights.transports.nccl.weight_links import ReceivingLink
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.mapped_image import MappedImage
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


class NodeReceiver:
    """Between nodes, an engine's part: fills the image of its node for the ranks of other nodes,
    until `close`. Owns the links and their mapping of the control block. `on_error` is called in
    the thread of a link that has failed; `error` is why."""

    def __init__(
        self,
        image: MappedImage,
        grid: BucketGrid,
        wire: Mapping[str, Any],
        timeout_s: float,
        on_error: Callable[[], None],
    ) -> None:
        self.error = ""
        self._image = image
        self._grid = grid
        self._receives: Mapping[str, Any] = wire["receives"]
        self._on_error = on_error
        self._deadline = time.monotonic() + float(wire["progress"]["timeout_s"])
        self._progress = SyncProgress.receive(wire["fd_socket"], wire["progress"], timeout_s)
        self._lock = threading.Lock()
        self._links = [
            ReceivingLink(
                endpoint,
                self._receives["key"],
                rank,
                self._grid,
                self._image,
                self._progress,
                self._deadline,
                self._fail,
                holds=self._receives["holds"],
            )
            for rank, endpoint in self._receives["ranks"]
        ]

    def close(self) -> None:
        """Ends the links. Nothing is written to the image any more when it returns."""
        for link in self._links:
            link.close()
        self._progress.close()

    def _fail(self, rank: int, error: Exception) -> None:
        with self._lock:
            if not self.error:
                num_filled, total = self._progress.num_filled()[rank], self._grid.num_buckets
                self.error = (
                    f"bucket {num_filled} of {total} did not arrive from rank {rank}: {error}"
                )
        self._on_error()
