from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.exports.exported_image import ExportedImage, MakeOpener, OpenedMemory
from umbra.runtime.weights.exports.ipc_memory import CudaOpener
from umbra.runtime.weights.image.destinations import Destinations
from umbra.runtime.weights.image.gpu_copies import GpuCopies, common_device
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.image.sync_progress import EngineEnd
from umbra.runtime.weights.links.image_source import ImageSource
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.shards import buffer_bytes

_OPEN_TIMEOUT_S: Final = 10.0


class WeightReceiver:
    """The engine's side of syncs: fills one engine's parameters, and lives as long as they do.

        begin -> load -> verify -> end         once for each version; `abort` if it is aborted

    It copies the image of its node, or reads the ranks' GPUs directly if it can. Calls block, from
    the thread that owns the parameters, except `stop`. It owns the mappings of the image and of the
    ranks' memory, and data derived from a layout, which the next version reuses. `parameters` have
    any strides, and may move between updates.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        timeout_s: float = _OPEN_TIMEOUT_S,
        make_opener: MakeOpener = CudaOpener,
    ) -> None:
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._image = KeptImage()
        self._memory = OpenedMemory(make_opener)
        self._layout: tuple[bytes, int] | None = None
        self._destinations: Destinations | None = None
        self._update: ImageReceiver | ExportReceiver | None = None

    def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        """Prepares for one version; aborts an update that was open.

        Args:
            manifest: the wire form from prepare_update.
            buckets: {"bucket_nbytes": int} from there, and the details of the transport's layout,
                with "engine" and "timeout_s" in their "progress".

        Raises WeightSyncError, with nothing touched, if names, shapes or dtypes differ from the
        parameters'. The manifest must have exactly their names; of tied parameters it may have any
        one name, several that share memory, or copies.
        """
        self.end()
        if "exports" in buckets:
            destinations = self._destinations_for(manifest, buckets["bucket_nbytes"])
            image = self._memory.image(manifest, buckets["exports"])
            end_of_sync = EngineEnd(buckets, self._timeout_s)
            self._update = ExportReceiver(destinations, self._memory, image, end_of_sync)
            return
        self._memory.close()
        destinations = self._destinations_for(manifest, buckets["bucket_nbytes"])
        nbytes = Manifest.from_wire(manifest).nbytes
        source = ImageSource(self._image, nbytes, buckets, self._timeout_s)
        device = common_device(self._parameters.values())
        self._update = ImageReceiver(destinations, source, device)

    def load(self) -> int:
        """Copies everything into the parameters as ranks provide it, once; returns its bytes.
        Raises WeightSyncError if the sync was aborted; the parameters are half written then."""
        return self._open_update().load()

    def stop(self) -> None:
        """Ends a `load` that waits. From any thread."""
        update = self._update
        if update is not None:
            update.end_of_sync.stop()

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """Compares the parameters with regions [image offset, nbytes, checksum or None]; returns a
        text for each difference, with tensor, byte range and both checksums."""
        self._open_update()
        assert self._destinations is not None
        return self._destinations.verify(regions)

    def end(self) -> None:
        update, self._update = self._update, None
        if update is not None and self._destinations is not None:
            self._destinations.drop_staging()
            update.close()

    def abort(self) -> None:
        """`end`, and closes the ranks' memory, because they may have ended. Idempotent."""
        self.end()
        self._memory.close()

    def release(self) -> None:
        """`end`, and unmaps the image, which `begin` maps again. Idempotent."""
        self.end()
        self._image.close()

    def close(self) -> None:
        """Frees everything. Idempotent."""
        self.abort()
        self._image.close()

    def _destinations_for(self, manifest: bytes, bucket_nbytes: int) -> Destinations:
        layout = (manifest, bucket_nbytes)
        if self._destinations is None or self._layout != layout:
            self._destinations = Destinations(
                Manifest.from_wire(manifest), self._parameters, bucket_nbytes
            )
            self._layout = layout
        return self._destinations

    def _open_update(self) -> ImageReceiver | ExportReceiver:
        if self._update is None:
            raise WeightSyncError("no update is in progress; prepare_update comes first")
        return self._update


class ImageReceiver:
    """Shared memory, an engine's part: copies one version, bucket by bucket. Owns the source."""

    def __init__(
        self, destinations: Destinations, source: ImageSource, device: torch.device
    ) -> None:
        self._device = device
        self._destinations = destinations
        self._source = source
        self.end_of_sync = source.end_of_sync

    @torch.no_grad()
    def load(self) -> int:
        nbytes, source = 0, self._source
        image = buffer_bytes(source.memory)
        copies = GpuCopies(self._device, self.end_of_sync.set_loaded)
        for idx, window in source.buckets(for_gpu=copies.is_on_gpu):
            nbytes += self._destinations.write(idx, image[window], waits=not copies.is_on_gpu)
            copies.mark(idx + 1)
        copies.wait()
        self._destinations.settle()
        return nbytes

    def close(self) -> None:
        self._source.close()


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
        self.end_of_sync = end_of_sync
        self._num_entries = len(image.manifest.entries)

    @torch.no_grad()
    def load(self) -> int:
        nbytes = 0
        try:
            for idx in self.end_of_sync.buckets(self._num_entries):
                for start, values in self._image.read(idx):
                    nbytes += self._destinations.write_values(idx, start, values)
                self.end_of_sync.set_loaded(idx + 1)
        finally:
            self._memory.leave()
        self._destinations.settle()
        return nbytes

    def close(self) -> None:
        self.end_of_sync.close()
