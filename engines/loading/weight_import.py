"""An update whose weights the engine's workers themselves read from the ranks' GPUs.

ranks ──exports──▶ supervisor ──▶ engine process ──description──▶ worker: its loader or its plan
                                  compares checksums ◀──regions── what it has loaded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from umbra.runtime.errors import WeightSyncError

_MAX_MISMATCHES: Final = 32
# Mismatches named in a report; the rest are counted.

WorkerRegions = Sequence[Sequence[int | None]]


class WeightImport:
    """One update; the arguments are those of begin_update."""

    def __init__(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        kept = ("exports", "fd_socket", "progress", "has_checksums", "is_staged")
        self.description: dict[str, Any] = {name: buckets[name] for name in kept}
        self.description["manifest"] = manifest
        self._read: list[dict[int, tuple[int, int | None]]] = []  # by worker

    def receiving(self) -> AbstractContextManager[None]:
        """The workers read the ranks' memory themselves."""
        return nullcontext()

    def note(self, per_worker: Sequence[WorkerRegions]) -> int:
        """Takes the workers' reports of what they have; returns the bytes of the model.

        Raises:
            WeightSyncError: no worker reports anything.
        """
        if not per_worker:
            raise WeightSyncError("no worker of the engine has read the weights")
        self._read = [
            {int(offset or 0): (int(nbytes or 0), checksum) for offset, nbytes, checksum in regions}
            for regions in per_worker
        ]
        return min(sum(nbytes for nbytes, _ in read.values()) for read in self._read)

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """Compares what was sent with what every worker has; returns what differs."""
        mismatches: list[str] = []
        for offset, sent_nbytes, sent in regions:
            for worker, read in enumerate(self._read):
                read_nbytes, arrived = read.get(int(offset or 0), (0, None))
                if read_nbytes != sent_nbytes or (sent is not None and arrived != sent):
                    mismatches.append(
                        f"worker {worker}, image bytes from {offset}: sent {sent_nbytes} with "
                        f"checksum {sent}, has {read_nbytes} with {arrived}"
                    )
        if len(mismatches) > _MAX_MISMATCHES:
            more = len(mismatches) - _MAX_MISMATCHES
            mismatches = [*mismatches[:_MAX_MISMATCHES], f"and {more} more"]
        return mismatches

    def stop(self) -> None:
        """An abort ends the waits of workers."""

    def close(self) -> None:
        """Holds nothing: workers do."""
