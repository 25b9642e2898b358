from __future__ import annotations

from collections.abc import Sequence

import torch

from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage
from umbra.runtime.weights.transports.cuda_ipc.opened_memory import OpenedMemory
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd


class ExportReceiver:
    """CUDA IPC, an engine's part: reads one version from the ranks' GPUs into its parameters,
    casting on the way. `memory` is open for this version; its owner keeps it."""

    def __init__(
        self,
        destinations: Destinations,
        memory: OpenedMemory,
        image: ExportedImage,
        end_of_sync: EngineEnd,
    ) -> None:
        self._destinations = destinations
        self._memory = memory
        self._image = image
        self._end_of_sync = end_of_sync
        self._num_entries = len(image.manifest.entries)

    @torch.no_grad()
    def load(self) -> int:
        nbytes = 0
        try:
            for idx in self._end_of_sync.buckets(self._num_entries):
                for start, values in self._image.read(idx):
                    nbytes += self._destinations.write_values(idx, start, values)
                self._end_of_sync.set_loaded(idx + 1)
        finally:
            self._memory.leave()
        self._destinations.settle()
        return nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return self._destinations.verify(regions)

    def stop(self) -> None:
        self._end_of_sync.stop()

    def close(self) -> None:
        self._destinations.drop_staging()
        self._end_of_sync.close()
