"""Cuts the flat image into buckets.

Bucket i is the window [i * bucket_nbytes, (i + 1) * bucket_nbytes) of the image; ranks and engines
report progress in buckets. An extent is a byte range of the image that one process holds in one
piece of its own memory: a whole parameter in an engine, a shard in a rank. A piece is the part of
an extent that falls into one bucket.

    image    |--- w0 ---|.|---------------- w1 ----------------|...|- w2 -|
    buckets  [     0     ][     1     ][     2     ][     3     ][     4 ...
    pieces     w0:0  w1:0     w1:1         w1:2         w1:3      w2:4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from umbra.runtime.weights.manifest import ALIGNMENT

PIECE_NBYTES: Final = 32 << 20
# Mapped, and locked for a GPU, at a time, which takes about 2 ms without a lock. Larger pieces make
# the first buckets of a first sync wait; smaller ones cost more calls.


@dataclass(frozen=True, slots=True)
class Extent:
    key: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """The part of an extent in one bucket.

    Attributes:
        key: the extent's.
        start: first byte within the extent.
        bucket_start: first byte within the bucket.
    """

    key: int
    start: int
    bucket_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketGrid:
    """The cuts of an image of `image_nbytes`: at least one bucket, maybe an empty one."""

    image_nbytes: int
    bucket_nbytes: int

    def __post_init__(self) -> None:
        if self.bucket_nbytes <= 0 or self.bucket_nbytes % ALIGNMENT:
            raise ValueError(
                f"bucket_nbytes must be a positive multiple of {ALIGNMENT}, "
                f"got {self.bucket_nbytes}"
            )

    @property
    def num_buckets(self) -> int:
        return max(1, -(-self.image_nbytes // self.bucket_nbytes))

    @property
    def fits_pieces(self) -> bool:
        """Whether no bucket crosses the edge of a piece of the image."""
        return PIECE_NBYTES % self.bucket_nbytes == 0

    def window(self, idx: int) -> slice:
        start = idx * self.bucket_nbytes
        return slice(start, min(start + self.bucket_nbytes, self.image_nbytes))

    def num_reaching(self, end: int) -> int:
        """The number of first buckets that hold all image bytes before `end`."""
        return min(self.num_buckets, -(-end // self.bucket_nbytes))

    def cut(self, extents: Sequence[Extent]) -> list[list[BucketPiece]]:
        buckets: list[list[BucketPiece]] = [[] for _ in range(self.num_buckets)]
        for extent in extents:
            if extent.offset < 0 or extent.offset + extent.nbytes > self.image_nbytes:
                raise ValueError(f"{extent} exceeds the image of {self.image_nbytes} bytes")
            start = 0
            while start < extent.nbytes:
                idx, bucket_start = divmod(extent.offset + start, self.bucket_nbytes)
                nbytes = min(extent.nbytes - start, self.bucket_nbytes - bucket_start)
                buckets[idx].append(BucketPiece(extent.key, start, bucket_start, nbytes))
                start += nbytes
        return buckets
