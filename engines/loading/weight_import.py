from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest

_MAX_MISMATCHES: Final = 32
# Mismatches named in a report; the rest are counted.

Regions = list[list[int]]
"""[image offset, nbytes, checksum] of each region."""


class WeightImport:
    """One update, with prepare_update's arguments, whose workers read the ranks' GPUs themselves.

    ranks ──exports──▶ supervisor ──▶ engine process ──description──▶ worker: its loader or its plan
                                    compares checksums ◀──regions── what it has loaded
    """

    def __init__(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        kept = ("exports", "fd_socket", "progress", "has_checksums", "is_staged")
        self.description: dict[str, Any] = {name: buckets[name] for name in kept}
        self.description["manifest"] = manifest
        self._nbytes = Manifest.from_wire(manifest).payload_nbytes
        self._read: list[dict[tuple[int, int], int]] = []  # checksums, by worker

    def receiving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def take_reports(self, per_worker: Sequence[Regions]) -> int:
        if not per_worker:
            raise WeightSyncError("no worker of the engine has read the weights")
        self._read = [
            {(offset, nbytes): checksum for offset, nbytes, checksum in regions}
            for regions in per_worker
        ]
        return self._nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        mismatches: list[str] = []
        for offset, nbytes, sent in regions:
            for worker, read in enumerate(self._read):
                arrived = read.get((int(offset or 0), int(nbytes or 0)))
                if arrived != sent:
                    mismatches.append(
                        f"worker {worker}, {nbytes} image bytes from {offset}: sent with checksum "
                        f"{sent}, arrived with {arrived}"
                    )
        if len(mismatches) > _MAX_MISMATCHES:
            more = len(mismatches) - _MAX_MISMATCHES
            mismatches = [*mismatches[:_MAX_MISMATCHES], f"and {more} more"]
        return mismatches

    def stop(self) -> None:
        """Does nothing: an abort of the sync ends the workers' waits."""
