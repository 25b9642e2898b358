"""Determines which bytes of the image a rank holds, and reads them.

Legend: N rows of dim 0, size W of the mesh dimension that shards it.

FSDP2 cuts dim 0 like torch.chunk: ceil(N / W) rows per rank, the last ranks get fewer or none. Rows
of a row-major tensor are one byte range, so no rank needs another's part.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.checksum import CastValues, checksums_of
from umbra.runtime.weights.manifest import (
    ITEMSIZES,
    BucketGrid,
    BucketPiece,
    Extent,
    Manifest,
    TensorEntry,
)
from umbra.runtime.weights.rank_exports import Offer
from umbra.runtime.weights.sync_messages import Region, SyncGrant, SyncSession

_Located = Sequence[tuple[int, Tensor]]

Export = Callable[[_Located, _Located], Offer]
"""Offers tensors and replicas of others' tensors, each with its offset in the image, to engines on
the same GPUs, or returns why it cannot."""


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tied tensors -> the first name with the same storage, offset and shape. Compares
    local shards, even empty ones, because those keep a storage of their own."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = local_part(tensor)
        key = (
            local.untyped_storage()._cdata,  # pyright: ignore[reportPrivateUsage]
            local.storage_offset(),
            local.stride(),
            local.dtype,
            tuple(local.shape),
            tuple(tensor.shape),
        )
        canonical = first.setdefault(key, name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    # A DTensor's own `detach` takes ten times as long.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_first_holder(tensor: Tensor, rank: int) -> bool:
    """Whether this rank sends its part of `tensor`: no rank before it has the same part."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        position
        for position, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def rows_held(name: str, tensor: Tensor, rank: int) -> tuple[int, int] | None:
    """The rows [start, stop) of dim 0 that this rank holds; None for the whole tensor. A plain
    tensor counts as rank 0's only: the others may have other values. Raises ValueError for a
    placement whose local part is not a run of rows."""
    if not isinstance(tensor, DTensor):
        return None if rank == 0 else (0, 0)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (0, 0)
    cut: tuple[int, int] | None = None
    for mesh_dim, placement in enumerate(tensor.placements):
        position = coordinate[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        if placement != Shard(0) or cut is not None:
            raise ValueError(
                f"tensor {name!r} has placements {tensor.placements}; weights can be published "
                "from replicated tensors and from tensors sharded once, on dim 0"
            )
        num_rows = tensor.shape[0]
        per_rank = math.ceil(num_rows / tensor.device_mesh.size(mesh_dim))
        start = min(position * per_rank, num_rows)
        cut = (start, min(start + per_rank, num_rows))
    return cut


def held_extent(key: int, entry: TensorEntry, tensor: Tensor, rank: int) -> Extent | None:
    """The byte range of the image that this rank holds of `tensor`, under `key`; None if it holds
    nothing. Raises ValueError if the placement is unusable, or contradicts the local part."""
    rows = rows_held(entry.name, tensor, rank)
    if rows is None:
        start, nbytes = 0, entry.nbytes
    else:
        row_nbytes = math.prod(entry.shape[1:]) * ITEMSIZES[entry.dtype]
        start, nbytes = rows[0] * row_nbytes, (rows[1] - rows[0]) * row_nbytes
    if nbytes == 0:
        return None
    local_nbytes = local_part(tensor).numel() * ITEMSIZES[entry.dtype]
    if local_nbytes != nbytes:
        raise ValueError(
            f"tensor {entry.name!r}: rank {rank} should hold {nbytes} bytes of "
            f"{entry.shape}, its local part has {local_nbytes}"
        )
    return Extent(key, entry.offset + start, nbytes)


def wire_manifest(
    tensors: Mapping[str, Tensor],
    wire_dtype: torch.dtype | None = None,
    *,
    kept: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    lora: LoraSpec | None = None,
) -> Manifest:
    """The layout, which every rank derives identically from global names, shapes and dtypes.

    Args:
        tensors: as a `WeightPublisher` gets them.
        wire_dtype: floating-point tensors travel in this dtype; None keeps each tensor's own.
        kept: names of tensors that keep theirs nevertheless.
        aliases: other name -> name in `tensors` for tied parameters; None finds them by storage.
        lora: the tensors are the matrices of this LoRA adapter, under PEFT's names. They go to
            engines that keep the weights of the model and apply the adapter to every request.
    """
    aliases = find_aliases(tensors) if aliases is None else aliases

    def dtype_on_wire(name: str, tensor: Tensor) -> torch.dtype:
        # One-byte floats are codes of a quantised format: a conversion would change their meaning.
        is_cast = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if wire_dtype is None or not is_cast or name in kept:
            return tensor.dtype
        return wire_dtype

    return Manifest.layout(
        (
            (name, dtype_name(dtype_on_wire(name, tensor)), tuple(tensor.shape))
            for name, tensor in tensors.items()
            if name not in aliases
        ),
        aliases,
        lora,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderParts:
    """A rank, as each transport's sender needs it: its shards, `replicas` of other ranks' shards,
    and whether its tensors keep their memory from one sync to the next. `export` stands in for CUDA
    IPC."""

    session: SyncSession
    shards: RankShards
    replicas: RankShards
    keeps_memory: bool
    export: Export | None


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


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def flatten(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as [N] with stride 1; shares memory with it.
    reshape(-1) keeps odd strides if there is at most one element, and such tensors cannot be
    viewed as bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def typed_view(data: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """Bytes, uint8 [nbytes], as a contiguous tensor of that dtype, by its name in a manifest."""
    return data.view(getattr(torch, dtype)).view(torch.Size(shape))


def buffer_bytes(buffer: mmap.mmap | NDArray[np.uint8]) -> Tensor:
    """The bytes of a bucket's memory, uint8 [nbytes]; a mapping stays mapped while the view lives,
    by numpy. torch.frombuffer (2.13) does not keep it: closing the mapping under it causes a
    segmentation fault."""
    return torch.as_tensor(np.frombuffer(buffer, dtype=np.uint8))
