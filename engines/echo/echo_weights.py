from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from umbra.engines.shell.engine_core import WeightUpdates
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.links.image_source import ImageSource
from umbra.runtime.weights.manifest import BucketGrid, Extent, Manifest

_OPEN_TIMEOUT_S = 10.0


def weights_fingerprint(tensors: Iterable[bytes | bytearray | memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for data in tensors:
        digest.update(data)
    return digest.intdigest()


class EchoWeights:
    """The bytes that an engine holds. Updates overwrite them in place, even an aborted one."""

    def __init__(self) -> None:
        self.image = bytearray()
        self._extents: Sequence[Extent] = ()
        self._fingerprint: int | None = None

    def lay_out(self, extents: Sequence[Extent], nbytes: int) -> None:
        """Bytes stay as they are if the layout has not changed."""
        if (len(self.image), list(self._extents)) != (nbytes, list(extents)):
            self.image = bytearray(nbytes)
        self._extents = extents
        self._fingerprint = None

    def write(self, start: int, data: memoryview) -> None:
        self.image[start : start + len(data)] = data
        self._fingerprint = None

    def fingerprint(self) -> int:
        """Before the first update, the fingerprint of no bytes."""
        if self._fingerprint is None:
            image = memoryview(self.image)
            self._fingerprint = weights_fingerprint(
                image[extent.offset : extent.offset + extent.nbytes] for extent in self._extents
            )
        return self._fingerprint

    def clear(self) -> None:
        self.lay_out((), 0)


class EchoUpdates(WeightUpdates):
    """Reads every byte of a sync, into `weights` if given. `verify` compares
    checksums with torch."""

    def __init__(self, weights: EchoWeights | None, *, verify: bool) -> None:
        self._weights = weights
        self._verify = verify
        self._image = KeptImage()
        self._source: ImageSource | None = None

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return "the echo engine has no GPU"

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        layout = Manifest.from_wire(manifest)
        self._nbytes = layout.nbytes
        self._extents = [Extent(key, e.offset, e.nbytes) for key, e in enumerate(layout.entries)]
        self._plan = BucketGrid(layout.nbytes, buckets["bucket_nbytes"]).cut(self._extents)
        self._source = await asyncio.to_thread(
            ImageSource, self._image, layout.nbytes, buckets, _OPEN_TIMEOUT_S
        )

    async def load(self) -> int:
        return await asyncio.to_thread(self._load)

    def _load(self) -> int:
        nbytes, source = 0, self._open_source()
        if self._weights is not None:
            self._weights.lay_out(self._extents, self._nbytes)
        for idx, window in source.buckets():
            if self._weights is not None:
                with memoryview(source.memory) as image:
                    self._weights.write(window.start, image[window])
            nbytes += sum(piece.nbytes for piece in self._plan[idx])
            source.end_of_sync.set_loaded(idx + 1)
        return nbytes

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        if not self._verify or self._weights is None:
            return []
        return _mismatches(self._weights.image, regions)

    def stop(self) -> None:
        if self._source is not None:
            self._source.close()

    async def end(self) -> None:
        self.stop()
        self._source = None

    async def abort(self) -> None:
        await self.end()

    async def release(self) -> None:
        await self.end()
        self._image.close()

    async def close(self) -> None:
        await self.release()

    def _open_source(self) -> ImageSource:
        if self._source is None:
            raise WeightSyncError("no update is in progress; prepare_update comes first")
        return self._source


def _mismatches(image: bytearray, regions: Sequence[Sequence[int | None]]) -> list[str]:
    import torch

    from umbra.runtime.weights.checksum import checksum_of

    data = torch.frombuffer(image, dtype=torch.uint8)
    found: list[str] = []
    for offset, nbytes, checksum in regions:
        if offset is None or nbytes is None or checksum is None:
            continue
        arrived = checksum_of(data[offset : offset + nbytes])
        if arrived != checksum:
            found.append(
                f"bytes [{offset}, {offset + nbytes}): sent {checksum:#018x}, "
                f"arrived {arrived:#018x}"
            )
    return found
