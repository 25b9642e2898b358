"""Shared memory, an engine's part: copies buckets into its parameters as ranks fill them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from umbra.runtime.weights.transports.byte_views import bucket_bytes
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.transports.shared_memory.memfd import MappedBucket
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd


class RingReceiver:
    """One version being loaded. Owns its side of the control block."""

    def __init__(
        self, destinations: Destinations, buckets: list[MappedBucket], end_of_sync: EngineEnd
    ) -> None:
        self._destinations = destinations
        self._buckets = buckets
        self._end_of_sync = end_of_sync

    @torch.no_grad()
    def load(self) -> int:
        memories = [bucket_bytes(bucket) for bucket in self._buckets]
        nbytes = 0
        for idx in self._end_of_sync.buckets(self._destinations.num_buckets):
            nbytes += self._destinations.write(idx, memories[idx % len(memories)])
        self._destinations.settle()
        return nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        self._end_of_sync.check_all_loaded(self._destinations.num_buckets)
        return self._destinations.verify(regions)

    def stop(self) -> None:
        self._end_of_sync.stop()

    def close(self) -> None:
        self._destinations.drop_staging()
        self._end_of_sync.close()
