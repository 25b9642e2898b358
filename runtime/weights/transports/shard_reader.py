from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.checksums.checksum import CastValues, checksums_of
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_calls import Region, SyncGrant
from umbra.runtime.weights.transports.byte_views import flatten
from umbra.runtime.weights.transports.shared_memory.bucket_grid import (
    BucketGrid,
    BucketPiece,
    Extent,
)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One tensor of this rank and the dtype it travels in."""

    tensor: Tensor
    wire_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShards:
    """All shards that one rank sends; the tensors' contents change between syncs.

    Attributes:
        extents: position of each of `sources` in the image; the key is its index there.
        locate: a tensor's part on this rank.
    """

    rank: int
    manifest: Manifest
    extents: Sequence[Extent]
    sources: Sequence[ShardSource]
    locate: Callable[[Tensor], Tensor]

    def located(self) -> list[tuple[int, Tensor]]:
        """The rank's part of each tensor, with its offset in the image."""
        shards = zip(self.extents, self.sources, strict=True)
        return [(extent.offset, self.locate(source.tensor)) for extent, source in shards]

    def reader(self) -> ShardReader:
        return ShardReader(self)


class ShardBuckets:
    def __init__(self, shards: RankShards) -> None:
        self._shards = shards
        self._last: tuple[int, list[list[BucketPiece]]] | None = None  # for buckets of this size

    def cut(self, grant: SyncGrant) -> list[list[BucketPiece]]:
        """A list per bucket. Raises ProtocolError if rank 0 publishes different tensors."""
        if self._last is None or self._last[0] != grant.bucket_nbytes:
            grid = BucketGrid(self._shards.manifest.nbytes, grant.bucket_nbytes)
            self._last = grant.bucket_nbytes, grid.cut(self._shards.extents)
        if len(self._last[1]) != grant.num_buckets:
            raise ProtocolError(
                f"rank {self._shards.rank} cuts its image into {len(self._last[1])} buckets, "
                f"rank 0's has {grant.num_buckets}: their tensors differ"
            )
        return self._last[1]


class ShardReader:
    """Reads pieces of shards as bytes of the wire dtype, each shard once in a sync. Holds a copy of
    the last shard that is not contiguous, and of all whose checksums are computed at once."""

    def __init__(self, shards: RankShards) -> None:
        self._shards = shards
        self._key = -1
        self._flat = torch.empty(0)

    def read_bucket(
        self,
        pieces: Sequence[BucketPiece],
        memory: Tensor,
        has_checksums: bool,
        *,
        waits: bool = True,
    ) -> list[Region]:
        """Writes all pieces of a bucket to its memory, uint8 [bucket_nbytes], and returns them.
        Checksums are those of the source's bytes, never of `memory`, so that they detect any
        corruption in between. With `waits`, copies from a GPU to the host are done."""
        sources: list[CastValues] = []
        for piece in pieces:
            source = self._values(piece)
            target = memory[piece.bucket_start : piece.bucket_start + piece.nbytes]
            # torch casts values where they are, so that they leave a GPU as they travel.
            target.view(source.dtype).copy_(source.values, non_blocking=not waits)
            sources.append(source)
        checksums = checksums_of(sources) if has_checksums else [None] * len(pieces)
        return [
            (self._shards.extents[piece.key].offset + piece.start, piece.nbytes, checksum)
            for piece, checksum in zip(pieces, checksums, strict=True)
        ]

    def read_checksums(self) -> list[int]:
        extents, sources = self._shards.extents, self._shards.sources
        return checksums_of(
            [CastValues(self._flat_shard(e.key), sources[e.key].wire_dtype) for e in extents]
        )

    def _values(self, piece: BucketPiece) -> CastValues:
        dtype = self._shards.sources[piece.key].wire_dtype
        start = piece.start // dtype.itemsize
        flat = self._flat_shard(piece.key)
        return CastValues(flat[start : start + piece.nbytes // dtype.itemsize], dtype)

    def _flat_shard(self, key: int) -> Tensor:
        if key != self._key:
            local = self._shards.locate(self._shards.sources[key].tensor)
            if local.is_complex():
                local = local.resolve_conj()
            self._flat = flatten(local.resolve_neg().contiguous())
            self._key = key
        return self._flat
