"""An engine's part of transports with buckets: copies them into its parameters as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from umbra.runtime.weights.transports.base import BucketSource
from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations


class BucketReceiver:
    """One version being loaded. Owns the source."""

    def __init__(self, destinations: Destinations, source: BucketSource) -> None:
        self._destinations = destinations
        self._source = source

    @torch.no_grad()
    def load(self) -> int:
        nbytes = 0
        for idx, memory in self._source.buckets(self._destinations.num_buckets):
            nbytes += self._destinations.write(idx, buffer_bytes(memory))
        self._destinations.settle()
        return nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        self._source.check_all_loaded(self._destinations.num_buckets)
        return self._destinations.verify(regions)

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        self._destinations.drop_staging()
        self._source.close()
