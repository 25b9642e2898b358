"""Shared memory, an engine's part: copies the image into its parameters, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.transports.shared_memory.image_source import ImageSource


class ImageReceiver:
    """One version being loaded. Owns the source."""

    def __init__(self, destinations: Destinations, source: ImageSource) -> None:
        self._destinations = destinations
        self._source = source

    @torch.no_grad()
    def load(self) -> int:
        nbytes = 0
        image = buffer_bytes(self._source.memory)
        for idx, window in self._source.buckets():
            nbytes += self._destinations.write(idx, image[window])
        self._destinations.settle()
        return nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        self._source.check_all_loaded()
        return self._destinations.verify(regions)

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        self._destinations.drop_staging()
        self._source.close()
