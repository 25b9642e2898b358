"""NCCL, an engine's part: the ring of its node, which one of its engines fills for the ranks of
other nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.nccl.link_pairs import link_device
from umbra.runtime.weights.transports.nccl.weight_links import ReceivingLink
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.memfd import MappedBucket
from umbra.runtime.weights.transports.shared_memory.ring_source import RingSource
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


class NodeReceiver:
    """A `BucketSource` whose ring is filled, from `buckets` on, by links of this process. Owns the
    ring's source and the links.

    Args:
        image_nbytes: of the manifest.
        wire: the arguments of begin_update; "receives" has the links.
        parameters: of the engine.
    """

    def __init__(
        self,
        ring: RingSource,
        mapped: Sequence[MappedBucket],
        image_nbytes: int,
        wire: Mapping[str, Any],
        timeout_s: float,
        parameters: Collection[Tensor],
    ) -> None:
        self._ring = ring
        self._device = link_device(parameters)
        self._mapped: Sequence[MappedBucket] = mapped
        self._grid = BucketGrid(image_nbytes, wire["bucket_nbytes"])
        self._receives: Mapping[str, Any] = wire["receives"]
        self._deadline = time.monotonic() + float(wire["progress"]["timeout_s"])
        self._progress = SyncProgress.receive(wire["fd_socket"], wire["progress"], timeout_s)
        self._links: list[ReceivingLink] = []
        self._lock = threading.Lock()
        self._error = ""

    def buckets(self, num_buckets: int) -> Iterator[tuple[int, Any]]:
        """See `BucketSource.buckets`."""
        key = self._receives["key"]
        memories = [buffer_bytes(bucket.memory) for bucket in self._mapped]
        try:
            self._links = [
                ReceivingLink(
                    endpoint,
                    key,
                    rank,
                    self._grid,
                    memories,
                    self._progress,
                    self._deadline,
                    self._on_error,
                    self._device,
                )
                for rank, endpoint in self._receives["ranks"]
            ]
            yield from self._ring.buckets(num_buckets)
        except WeightSyncError as error:
            if self._error:
                raise WeightSyncError(self._error) from error
            raise
        finally:
            for link in self._links:
                link.close()
            self._links, self._mapped = [], ()  # a cycle would keep the ring mapped

    def check_all_loaded(self, num_buckets: int) -> None:
        """See `BucketSource.check_all_loaded`."""
        self._ring.check_all_loaded(num_buckets)

    def stop(self) -> None:
        self._ring.stop()

    def close(self) -> None:
        self._ring.close()
        self._progress.close()

    def _on_error(self, rank: int, error: Exception) -> None:
        with self._lock:
            if not self._error:
                (num_filled, total) = self._progress.num_filled()[rank], self._grid.num_buckets
                self._error = (
                    f"bucket {num_filled} of {total} did not arrive from rank {rank}: {error}"
                )
        self._ring.stop()
