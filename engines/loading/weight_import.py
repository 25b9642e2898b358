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
        self._read: list[dict[int, tuple[int, int | None]]] | None = None

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

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Compares what was sent with what every worker has; returns count, nbytes and
        mismatches."""
        if self._read is None:
            raise WeightSyncError("nothing was loaded before verifying")
        mismatches: list[str] = []
        count = nbytes = 0
        for offset, sent_nbytes, sent in regions:
            found = [read.get(int(offset or 0), (0, None)) for read in self._read]
            for worker, (read_nbytes, arrived) in enumerate(found):
                if read_nbytes != sent_nbytes or (sent is not None and arrived != sent):
                    mismatches.append(
                        f"worker {worker}, image bytes from {offset}: sent {sent_nbytes} with "
                        f"checksum {sent}, has {read_nbytes} with {arrived}"
                    )
            count += 1
            nbytes += min(read_nbytes for read_nbytes, _ in found)
        if len(mismatches) > _MAX_MISMATCHES:
            more = len(mismatches) - _MAX_MISMATCHES
            mismatches = [*mismatches[:_MAX_MISMATCHES], f"and {more} more"]
        return {"count": count, "nbytes": nbytes, "mismatches": mismatches}

    def stop(self) -> None:
        """An abort ends the waits of workers."""

    def close(self) -> None:
        """Holds nothing: workers do."""
