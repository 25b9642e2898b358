"""Shared memory, an engine's part: the buckets that it has mapped and ranks fill."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

from umbra.runtime.weights.transports.shared_memory.memfd import MappedBucket
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd


class RingSource:
    """Implements `BucketSource`. Owns its side of the control block. Torch-free."""

    def __init__(self, mapped: Sequence[MappedBucket], end_of_sync: EngineEnd) -> None:
        self._mapped = mapped
        self._end_of_sync = end_of_sync

    def buckets(self, num_buckets: int) -> Iterator[tuple[int, mmap.mmap]]:
        """See `BucketSource.buckets`."""
        for idx in self._end_of_sync.buckets(num_buckets):
            yield idx, self._mapped[idx % len(self._mapped)].memory

    def check_all_loaded(self, num_buckets: int) -> None:
        self._end_of_sync.check_all_loaded(num_buckets)

    def stop(self) -> None:
        self._end_of_sync.stop()

    def close(self) -> None:
        self._end_of_sync.close()
