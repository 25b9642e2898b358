"""NCCL, an engine's part: assembles buckets from what every rank sends of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.nccl.weight_links import Chunk, LinkAddress, ReceivingLink
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid

_STOP_INTERVAL_S: Final = 0.05
# How often a wait looks whether it was stopped.


class LinkSource:
    """The buckets of one sync; implements `BucketSource`. Owns the links, from `buckets` on.

    Args:
        image_nbytes: of the manifest.
        wire: the arguments of begin_update.
    """

    def __init__(self, image_nbytes: int, wire: Mapping[str, Any]) -> None:
        progress: Mapping[str, Any] = wire["progress"]
        self._grid = BucketGrid(image_nbytes, wire["bucket_nbytes"])
        self._deadline = time.monotonic() + float(progress["timeout_s"])
        self._addresses = [
            LinkAddress(wire["store"], f"{wire['key']}/{progress['engine']}/{rank}")
            for rank in range(progress["num_ranks"])
        ]
        self._links: list[ReceivingLink] = []
        self._is_stopped = False
        self._num_loaded = 0

    def buckets(self, num_buckets: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """See `BucketSource.buckets`."""
        if self._links:
            raise WeightSyncError("the buckets of this update were loaded before")
        bucket = torch.zeros(self._grid.bucket_nbytes, dtype=torch.uint8)
        memory = bucket.numpy()
        try:
            self._links = [
                ReceivingLink(address, self._grid, self._deadline) for address in self._addresses
            ]
            for idx in range(num_buckets):
                for rank, link in enumerate(self._links):
                    chunk = self._take(rank, link, idx)
                    for start, piece in chunk.pieces:
                        arrived = chunk.memory[start : start + piece.nbytes]
                        bucket[piece.bucket_start : piece.bucket_start + piece.nbytes] = arrived
                    link.give_back(chunk)
                yield idx, memory
                self._num_loaded = idx + 1
        finally:
            for link in self._links:
                link.close()

    def check_all_loaded(self, num_buckets: int) -> None:
        """See `BucketSource.check_all_loaded`."""
        if self._num_loaded != num_buckets:
            raise WeightSyncError(
                f"{self._num_loaded} of {num_buckets} buckets were loaded before verifying"
            )

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self.stop()

    def _take(self, rank: int, link: ReceivingLink, idx: int) -> Chunk:
        while not self._is_stopped:
            try:
                chunk = link.take(_STOP_INTERVAL_S)
            except Exception as error:  # gloo raises RuntimeError for everything
                raise WeightSyncError(
                    f"bucket {idx} of {self._grid.num_buckets} did not arrive from rank {rank}: "
                    f"{error}"
                ) from error
            if chunk is not None:
                return chunk
        raise WeightSyncError(f"the update was stopped before bucket {idx} arrived")
