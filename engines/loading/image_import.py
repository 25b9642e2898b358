from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor

from umbra.engines.loading.weight_import import Regions
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.byte_views import buffer_bytes, typed_view
from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.transports.shared_memory.image_source import ImageSource
from umbra.runtime.weights.transports.shared_memory.mapped_image import KeptImage

_OPEN_TIMEOUT_S: Final = 10.0


class ImageImport:
    """One update, with prepare_update's arguments, whose weights workers read from
    their node's image.

        ranks ──fill──▶ image of the node ◀──read── every worker: its own loader, or its plan
                             └──▶ engine process: compares checksums
    """

    def __init__(self, kept: KeptImage, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        self._layout = Manifest.from_wire(manifest)
        self._bucket_nbytes: int = buckets["bucket_nbytes"]
        self._source = ImageSource(kept, self._layout.nbytes, buckets, _OPEN_TIMEOUT_S)
        known = ("fd_socket", "image", "bucket_nbytes", "progress")
        self.description: dict[str, Any] = {name: buckets[name] for name in known}
        self.description["manifest"] = manifest

    def receiving(self) -> AbstractContextManager[None]:
        return self._source.receiving()

    def take_reports(self, per_worker: Sequence[Regions]) -> int:
        return self._layout.payload_nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        tensors = image_tensors(self._layout, self._source.memory)
        return Destinations(self._layout, tensors, self._bucket_nbytes).verify(regions)

    def stop(self) -> None:
        """Ends the workers' waits for ranks. From any thread."""
        self._source.stop()

    def close(self) -> None:
        self._source.close()


def image_tensors(manifest: Manifest, memory: mmap.mmap) -> dict[str, Tensor]:
    """The manifest's tensors as views of an image, which stays mapped while they live."""
    image = buffer_bytes(memory)
    return {
        entry.name: typed_view(image[entry.offset : entry.end], entry.dtype, entry.shape)
        for entry in manifest.entries
    }
