"""The echo engine's end of a weight sync: takes every byte, keeps it only to check it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umbra.runtime.weights.image import BucketGrid, Extent
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.memfd import BucketMappings
from umbra.runtime.weights.progress import EngineEnd

_OPEN_TIMEOUT_S = 10.0


class EchoReceiver:
    """One update. Blocks for I/O when made.

    Args:
        verify: keep a copy of the image and check checksums, which imports torch.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        buckets: Mapping[str, Any],
        mappings: BucketMappings,
        *,
        verify: bool,
    ) -> None:
        layout = Manifest.from_wire(manifest)
        self._bucket_nbytes: int = buckets["bucket_nbytes"]
        extents = [Extent(key, e.offset, e.nbytes) for key, e in enumerate(layout.entries)]
        self._plan = BucketGrid(layout.nbytes, self._bucket_nbytes).cut(extents)
        self._image = bytearray(len(self._plan) * self._bucket_nbytes) if verify else None
        self._buckets = mappings.open(
            buckets["fd_socket"], buckets["names"], self._bucket_nbytes, _OPEN_TIMEOUT_S
        )
        self._end = EngineEnd(buckets, _OPEN_TIMEOUT_S)

    def load(self) -> int:
        """Takes all buckets as they are filled, once; their payload bytes. Blocks.

        Raises:
            WeightSyncError: the sync was given up.
        """
        nbytes = 0
        for idx in self._end.buckets(len(self._plan)):
            if self._image is not None:
                start = idx * self._bucket_nbytes
                bucket = self._buckets[idx % len(self._buckets)]
                self._image[start : start + self._bucket_nbytes] = bucket.memory[:]
            nbytes += sum(piece.nbytes for piece in self._plan[idx])
        return nbytes

    def close(self) -> None:
        """Leaves the sync; a `load` that waits in another thread ends. Idempotent."""
        self._end.close()

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Counts the regions, and checks them where a copy was kept."""
        self._end.check_all_loaded(len(self._plan))
        return {
            "count": len(regions),
            "nbytes": sum(region[1] or 0 for region in regions),
            "mismatches": [] if self._image is None else _mismatches(self._image, regions),
        }


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
