"""A rank's side of a ring of buckets in shared memory, for one sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from umbra.runtime.weights.sync_calls import remaining_s
from umbra.runtime.weights.transports.byte_views import buffer_bytes
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings, MappedBucket
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress


class RingFiller:
    """Owns the mapping of the control block, but not the buckets."""

    def __init__(
        self, rank: int, buckets: Sequence[MappedBucket], progress: SyncProgress, deadline: float
    ) -> None:
        self._rank = rank
        self._memories = [buffer_bytes(bucket.memory) for bucket in buckets]
        self._progress = progress
        self._deadline = deadline

    @classmethod
    def open(
        cls,
        rank: int,
        details: Mapping[str, Any],
        bucket_nbytes: int,
        mappings: BucketMappings,
        deadline: float,
    ) -> Self | None:
        """None if the ring is no longer offered.

        Args:
            details: names, fd_socket and progress of the ring.
        """
        left_s, fd_socket = remaining_s(deadline), details["fd_socket"]
        buckets = mappings.open(fd_socket, details["names"], bucket_nbytes, left_s)
        progress = SyncProgress.receive_open(fd_socket, details["progress"], left_s)
        return None if progress is None else cls(rank, buckets, progress, deadline)

    def wait(self, idx: int, while_waiting: Callable[[], None]) -> Tensor | None:
        """Waits until bucket `idx` may be written, and returns its memory: uint8 [bucket_nbytes].
        None if the ring is aborted.

        Raises:
            DeadlineExceeded: the time of the sync is used up.
        """
        num_needed = idx + 1 - len(self._memories)  # then the memory of bucket idx is free again
        if not self._progress.wait_loaded(num_needed, self._deadline, while_waiting):
            return None
        return self._memories[idx % len(self._memories)]

    def set_filled(self, idx: int) -> None:
        """Notes that the rank has written bucket `idx`."""
        self._progress.set_filled(self._rank, idx + 1)

    def close(self) -> None:
        self._memories = []
        self._progress.close()
