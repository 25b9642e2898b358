from __future__ import annotations

from collections.abc import Sequence

import torch

from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.transports.shared_memory.gpu_copies import GpuCopies
from umbra.runtime.weights.transports.shared_memory.image_source import ImageSource


class ImageReceiver:
    """Shared memory, an engine's part: copies one version, bucket by bucket. Owns the source."""

    def __init__(
        self, destinations: Destinations, source: ImageSource, device: torch.device
    ) -> None:
        self._device = device
        self._destinations = destinations
        self._source = source

    @torch.no_grad()
    def load(self) -> int:
        nbytes, source = 0, self._source
        image = buffer_bytes(source.memory)
        copies = GpuCopies(self._device, source.set_loaded)
        for idx, window in source.buckets(for_gpu=copies.is_on_gpu):
            nbytes += self._destinations.write(idx, image[window], waits=not copies.is_on_gpu)
            copies.mark(idx + 1)
        copies.wait()
        self._destinations.settle()
        return nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return self._destinations.verify(regions)

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        self._destinations.drop_staging()
        self._source.close()
