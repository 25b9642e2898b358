"""The trainer's end of a sync: ranks copy their shards into shared buckets.

rank 0  fill 0 | fill 1 | wait | fill 2 ...      each rank fills its own bytes of a bucket,
rank 1  fill 0 | fill 1 | wait | fill 2 ...      no rank sees another's
engine         | load 0        | load 1 ...      with two buffers; bucket i + 2 has that of i

Who is how far is in shared memory (`sync_progress`); the supervisor is told once,
when this rank has filled everything. Where all can, engines read the ranks' GPUs instead: then a
rank exports its shards, and there is nothing to fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from umbra.runtime.errors import DeadlineExceeded, ProtocolError, UmbraError, WeightSyncError
from umbra.runtime.weights.checksum import checksum_of, copy_with_checksum
from umbra.runtime.weights.shards import find_aliases, held_extent, local_part, wire_manifest
from umbra.runtime.weights.sync_calls import (
    Region,
    SyncAbort,
    SyncBegin,
    SyncEnd,
    SyncFilled,
    SyncGrant,
    SyncReport,
    SyncSupervisor,
)
from umbra.runtime.weights.transports.byte_views import bucket_bytes, flatten
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import export_tensors
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import Offer
from umbra.runtime.weights.transports.shared_memory.bucket_grid import (
    BucketGrid,
    BucketPiece,
    Extent,
)
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings, MappedBucket
from umbra.runtime.weights.transports.shared_memory.sync_progress import SyncProgress

_ABORT_TIMEOUT_S: Final = 5.0
# How long a failing rank tries to tell the supervisor; after that the lease ends the sync anyway.


@dataclass(frozen=True, slots=True)
class _Source:
    """One tensor of this rank and the dtype it travels in."""

    tensor: Tensor
    wire_dtype: torch.dtype


class WeightPublisher:
    """Publishes one set of tensors. Every rank has one and calls `publish` with the others.

    Plain tensors (buffers, unsharded modules) come from rank 0; DTensors from the rank that holds
    the shard. The tensors are read in `publish` only, and must not change while it runs.

    Args:
        tensors: name -> parameter or buffer, plain or DTensor; the same names, shapes and order on
            every rank. Updated in place between calls, never replaced.
        wire_dtype: floating-point tensors travel in this dtype; None keeps each one's own.
        aliases: further name -> name in `tensors` for tied parameters; None finds them by storage.
        keep_dtype: names exempt from `wire_dtype`, such as rotary frequencies.
        locate: a tensor's part on this rank, for tensors whose memory may be elsewhere.
        on_read: called when the tensors of this rank have been read, by itself or by the engines:
            they take memory for their KV cache only after it has returned on every rank.
        export: offers tensors, each with its offset in the image, to engines on the same GPUs; or
            says why it cannot.
    """

    def __init__(
        self,
        supervisor: SyncSupervisor,
        rank: int,
        world_size: int,
        tensors: Mapping[str, Tensor],
        wire_dtype: torch.dtype | None = None,
        aliases: Mapping[str, str] | None = None,
        keep_dtype: Collection[str] = (),
        *,
        locate: Callable[[Tensor], Tensor] = local_part,
        on_read: Callable[[], None] | None = None,
        export: Callable[[Sequence[tuple[int, Tensor]]], Offer] = export_tensors,
    ) -> None:
        self._supervisor = supervisor
        self._rank = rank
        self._world_size = world_size
        aliases = find_aliases(tensors) if aliases is None else aliases
        self.manifest = wire_manifest(tensors, aliases, wire_dtype, frozenset(keep_dtype))
        self._sources: list[_Source] = []
        self._extents: list[Extent] = []
        for entry in self.manifest.entries:
            tensor = tensors[entry.name]
            extent = held_extent(len(self._sources), entry, tensor, rank)
            if extent is not None:
                self._sources.append(_Source(tensor, getattr(torch, entry.dtype)))
                self._extents.append(extent)
        self._locate = locate
        self._on_read = on_read
        self._export = export
        self._mappings = BucketMappings()
        self._wire = self.manifest.to_wire()
        self._plan: tuple[int, list[list[BucketPiece]]] | None = None  # for buckets of this size

    def publish(self, pool: str, version: int, timeout_s: float) -> SyncReport:
        """Carries the tensors to the engines of `pool`; returns when they serve `version`.

        Collective: all ranks. If `version` is the one the pool already has, only the engines that
        lack it take part. Where the pool is updated in waves, that is one sync for each of them.
        Any failure here aborts the sync for every rank.

        Raises:
            WeightSyncError: no engine got the version, or a rank did not come or failed.
            DeadlineExceeded: `timeout_s` seconds went by.
        """
        deadline = time.monotonic() + timeout_s
        report = self._publish_wave(pool, version, deadline)
        while report.remaining:  # the same on every rank
            report = report.joined(self._publish_wave(pool, version, deadline))
        return report

    def _publish_wave(self, pool: str, version: int, deadline: float) -> SyncReport:
        supervisor, rank = self._supervisor, self._rank
        grant = supervisor.sync_begin(
            SyncBegin(
                pool=pool,
                version=version,
                rank=rank,
                world_size=self._world_size,
                manifest=self._wire if rank == 0 else None,
                offer=self._offer(),
                deadline=deadline,
            )
        )
        sync_id = grant.sync_id
        is_exported = grant.transport == "cuda_ipc"
        on_read = self._on_read or _nothing
        try:
            hand_over = self._lend if is_exported else self._transfer
            regions = hand_over(grant, deadline)
            if regions is not None:
                if not is_exported:
                    on_read()
                filled = SyncFilled(sync_id=sync_id, rank=rank, regions=regions, deadline=deadline)
                supervisor.sync_filled(filled)
                if is_exported:
                    on_read()
            # Of a sync that was given up, this raises the reason.
            return supervisor.sync_end(SyncEnd(sync_id=sync_id, rank=rank, deadline=deadline))
        except BaseException as error:
            # The first error is the one to see; the lease covers a supervisor out of reach.
            reason = f"{type(error).__name__}: {error}"
            until = time.monotonic() + _ABORT_TIMEOUT_S
            with suppress(UmbraError):
                supervisor.sync_abort(
                    SyncAbort(sync_id=sync_id, rank=rank, reason=reason, deadline=until)
                )
            raise

    def close(self) -> None:
        """Unmaps the buckets, which `publish` keeps mapped and would map anew. Idempotent."""
        self._mappings.close()

    def _transfer(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Fills all buckets; the regions, or None where the sync was given up meanwhile."""
        plan = self._plan_for(grant.bucket_nbytes)
        if len(plan) != grant.num_buckets:
            raise ProtocolError(
                f"rank {self._rank} cuts its image into {len(plan)} buckets, "
                f"rank 0's has {grant.num_buckets}: their tensors differ"
            )
        left_s = _remaining_s(deadline)
        buckets = self._mappings.open(grant.fd_socket, grant.buckets, grant.bucket_nbytes, left_s)
        progress = _open_progress(grant, left_s)
        if progress is None:
            return None
        try:
            return self._fill_buckets(plan, buckets, progress, grant.has_checksums, deadline)
        finally:
            progress.close()

    def _offer(self) -> Offer:
        shards = zip(self._extents, self._sources, strict=True)
        return self._export([(e.offset, self._locate(source.tensor)) for e, source in shards])

    @torch.no_grad()
    def _lend(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Engines read this rank's tensors; the regions, or None where the sync was given up."""
        num_entries = len(self.manifest.entries)
        if num_entries != grant.num_buckets:
            raise ProtocolError(
                f"rank {self._rank} publishes {num_entries} tensors, "
                f"rank 0 {grant.num_buckets}: their tensors differ"
            )
        progress = _open_progress(grant, _remaining_s(deadline))
        if progress is None:
            return None
        try:
            progress.set_filled(self._rank, num_entries)  # they have been ready since the offer
            reader = _ShardReader(self._sources, self._locate)
            return [
                (
                    extent.offset,
                    extent.nbytes,
                    reader.checksum(extent) if grant.has_checksums else None,
                )
                for extent in self._extents
            ]
        finally:
            progress.close()

    def _plan_for(self, bucket_nbytes: int) -> list[list[BucketPiece]]:
        if self._plan is None or self._plan[0] != bucket_nbytes:
            grid = BucketGrid(self.manifest.nbytes, bucket_nbytes)
            self._plan = bucket_nbytes, grid.cut(self._extents)
        return self._plan[1]

    @torch.no_grad()
    def _fill_buckets(
        self,
        plan: list[list[BucketPiece]],
        buckets: list[MappedBucket],
        progress: SyncProgress,
        has_checksums: bool,
        deadline: float,
    ) -> list[Region] | None:
        reader = _ShardReader(self._sources, self._locate)
        memories = [bucket_bytes(bucket) for bucket in buckets]
        regions: list[Region] = []
        for idx, pieces in enumerate(plan):
            num_needed = idx + 1 - len(memories)  # then the memory of bucket idx is free again
            if not progress.wait_loaded(num_needed, deadline, self._supervisor.check):
                return None
            memory = memories[idx % len(memories)]
            for piece in pieces:
                target = memory[piece.bucket_start : piece.bucket_start + piece.nbytes]
                checksum = reader.read_into(piece, target, has_checksums)
                offset = self._extents[piece.key].offset + piece.start
                regions.append((offset, piece.nbytes, checksum))
            progress.set_filled(self._rank, idx + 1)
        return regions


class _ShardReader:
    """Reads pieces of shards as bytes of the wire dtype. Holds one contiguous copy at most."""

    def __init__(self, sources: list[_Source], locate: Callable[[Tensor], Tensor]) -> None:
        self._sources = sources
        self._locate = locate
        self._key = -1
        self._flat = torch.empty(0)

    def read_into(self, piece: BucketPiece, target: Tensor, has_checksums: bool) -> int | None:
        """Writes the piece to `target`: uint8 [piece.nbytes].

        Returns the checksum of the bytes as they are in the source, never of `target`: whatever
        goes wrong in between shall show. None unless `has_checksums`.
        """
        dtype = self._sources[piece.key].wire_dtype
        flat = self._flat_shard(piece.key)
        start = piece.start // dtype.itemsize
        values = flat[start : start + piece.nbytes // dtype.itemsize]  # [piece elements]
        if not has_checksums:
            target.view(dtype).copy_(values)
            return None
        data = values.to(dtype).view(torch.uint8)  # [piece.nbytes]
        if data.device.type == "cpu":
            return copy_with_checksum(data, target)
        target.copy_(data)
        return checksum_of(data)

    def checksum(self, extent: Extent) -> int:
        """Of a whole shard, in the dtype in which it travels."""
        data = self._flat_shard(extent.key).to(self._sources[extent.key].wire_dtype)
        return checksum_of(data.view(torch.uint8))

    def _flat_shard(self, key: int) -> Tensor:
        if key != self._key:
            local = self._locate(self._sources[key].tensor)
            if local.is_complex():
                local = local.resolve_conj()
            self._flat = flatten(local.resolve_neg().contiguous())
            self._key = key
        return self._flat


def _open_progress(grant: SyncGrant, timeout_s: float) -> SyncProgress | None:
    """The control block, or None where it is offered no more: the sync was given up."""
    try:
        return SyncProgress.receive(grant.fd_socket, grant.progress, timeout_s)
    except WeightSyncError:
        return None


def _nothing() -> None:
    """For publishers whose memory nobody waits for."""


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded("the time for this sync is used up")
    return remaining_s
