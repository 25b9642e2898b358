"""The engine's end of syncs: buckets into parameters, and the proof that they arrived.

Where the ranks' GPUs can be read, parameters are filled from there, without buckets.

begin -> load -> finish -> end         once for each version; `end` alone where it is given up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.byte_views import bucket_bytes
from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage, MakeOpener
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings, MappedBucket
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

_OPEN_TIMEOUT_S: Final = 10.0


class WeightReceiver:
    """Receives versions into one engine's parameters. Lives as long as these.

    Blocks; an engine calls it from the thread that owns the parameters, `stop` excepted. Owns the
    mapping of the buckets and what it has worked out about a layout: both serve the next version.

    Args:
        parameters: name -> parameter or buffer of this engine, any strides. They may move to other
            memory between updates, by their storages.
        timeout_s: for the supervisor to hand over the buckets.
        make_opener: opens what ranks export.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        timeout_s: float = _OPEN_TIMEOUT_S,
        make_opener: MakeOpener = CudaOpener,
    ) -> None:
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._make_opener = make_opener
        self._mappings = BucketMappings()
        self._layout: tuple[Mapping[str, Any], int] | None = None
        self._destinations: Destinations | None = None
        self._update: _Update | _Import | None = None

    def begin(self, manifest: Mapping[str, Any], buckets: Mapping[str, Any]) -> None:
        """Gets ready for one version; an update that was open is given up.

        Args:
            manifest: the wire form that came with begin_update.
            buckets: {"fd_socket": path, "names": [...], "bucket_nbytes": int} from there, with
                what `EngineEnd` wants; or with "exports" of the ranks where "transport" says so.

        Raises:
            WeightSyncError: names, shapes or dtypes are not those of the parameters: the
                manifest's names must be exactly theirs, of tied ones any one, several sharing
                memory, or copies. Nothing was touched.
            ProtocolError: a malformed manifest.
        """
        self.end()
        bucket_nbytes: int = buckets["bucket_nbytes"]
        destinations = self._destinations_for(manifest, bucket_nbytes)
        if buckets.get("transport") == "cuda_ipc":
            image = ExportedImage(
                Manifest.from_wire(manifest), buckets["exports"], self._make_opener
            )
            self._update = _Import(destinations, image, EngineEnd(buckets, self._timeout_s))
            return
        mapped = self._mappings.open(
            buckets["fd_socket"], buckets["names"], bucket_nbytes, self._timeout_s
        )
        self._update = _Update(destinations, mapped, EngineEnd(buckets, self._timeout_s))

    def load(self) -> int:
        """Copies all buckets into the parameters as ranks fill them; the bytes copied. Once.

        When it returns, the parameters have their values.

        Raises:
            WeightSyncError: the sync was given up; the parameters are half written.
        """
        return self._open_update().load()

    def stop(self) -> None:
        """Ends a `load` that waits. From any thread."""
        update = self._update
        if update is not None:
            update.end_of_sync.stop()

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Verifies every region [image offset, nbytes, checksum or None] in the parameters.

        Returns {"count": regions, "nbytes": their bytes, "mismatches": [text, ...]}; the text names
        tensor, byte range and both checksums.

        Raises:
            WeightSyncError: not every bucket was loaded.
            ProtocolError: a region is not inside one tensor.
        """
        return self._open_update().finish(regions)

    def end(self) -> None:
        """Leaves the sync, committed or given up. Idempotent."""
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def close(self) -> None:
        """As `end`, and unmaps the buckets, which `begin` would map anew. Idempotent."""
        self.end()
        self._mappings.close()

    def _destinations_for(self, manifest: Mapping[str, Any], bucket_nbytes: int) -> Destinations:
        layout = (manifest, bucket_nbytes)
        if self._destinations is None or self._layout != layout:
            self._destinations = Destinations(
                Manifest.from_wire(manifest), self._parameters, bucket_nbytes
            )
            self._layout = layout
        return self._destinations

    def check_open(self) -> None:
        """Raises WeightSyncError where no update is in progress."""
        self._open_update()

    def _open_update(self) -> _Update | _Import:
        if self._update is None:
            raise WeightSyncError("no update is in progress; begin_update comes first")
        return self._update


class _Update:
    """One version under way. Owns its end of the control block."""

    def __init__(
        self, destinations: Destinations, buckets: list[MappedBucket], end_of_sync: EngineEnd
    ) -> None:
        self.end_of_sync = end_of_sync
        self._destinations = destinations
        self._buckets = buckets

    def load(self) -> int:
        memories = [bucket_bytes(bucket) for bucket in self._buckets]
        nbytes = 0
        with torch.no_grad():
            for idx in self.end_of_sync.buckets(self._destinations.num_buckets):
                nbytes += self._destinations.write(idx, memories[idx % len(memories)])
            self._destinations.settle()
        return nbytes

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        self.end_of_sync.check_all_loaded(self._destinations.num_buckets)
        return _verify(self._destinations, regions)

    def close(self) -> None:
        self._destinations.drop_staging()
        self.end_of_sync.close()


class _Import:
    """The same from the ranks' own memory, which is open while `load` runs."""

    def __init__(
        self, destinations: Destinations, image: ExportedImage, end_of_sync: EngineEnd
    ) -> None:
        self.end_of_sync = end_of_sync
        self._destinations = destinations
        self._image = image
        self._num_entries = len(image.manifest.entries)

    @torch.no_grad()
    def load(self) -> int:
        nbytes = 0
        try:
            for idx in self.end_of_sync.buckets(self._num_entries):
                for start, values in self._image.read(idx):
                    nbytes += self._destinations.write_values(idx, start, values)
        finally:
            self._image.close()
        self._destinations.settle()
        return nbytes

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        self.end_of_sync.check_all_loaded(self._num_entries)
        return _verify(self._destinations, regions)

    def close(self) -> None:
        self._image.close()
        self._destinations.drop_staging()
        self.end_of_sync.close()


def _verify(destinations: Destinations, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
    nbytes, mismatches = destinations.verify(regions)
    return {"count": len(regions), "nbytes": nbytes, "mismatches": mismatches}
