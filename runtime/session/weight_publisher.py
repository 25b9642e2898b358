from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Final

import torch
from torch import Tensor

from umbra.runtime.engine_api.pool_settings import TRANSPORTS, TransportName
from umbra.runtime.errors import UmbraError
from umbra.runtime.weights.manifest import Extent, Manifest
from umbra.runtime.weights.shards import (
    Export,
    RankShards,
    SenderParts,
    ShardSource,
    held_extent,
    is_first_holder,
    local_part,
    wire_manifest,
)
from umbra.runtime.weights.sync_messages import (
    SyncAbort,
    SyncBegin,
    SyncEnd,
    SyncFilled,
    SyncReport,
    SyncSession,
)
from umbra.runtime.weights.transport import Sender

_ABORT_TIMEOUT_S: Final = 5.0
# How long a failing rank tries to reach the supervisor; after that the lease ends the sync anyway.


class WeightPublisher:
    """The trainer's side of a sync: every rank publishes its shards of one set of tensors,
    with the others.

    Plain tensors (buffers, unsharded modules) come from rank 0; DTensors from the rank that holds
    the shard. If several do, which must then have the same values, the first one sends it, and an
    engine on the GPU of another one reads it there. Only `publish` reads the tensors; they must not
    change while it runs.

    Args:
        tensors: name -> parameter or buffer, plain or DTensor; the same names, shapes and order
            on every rank. Updated in place between calls, never replaced.
        manifest: of the same tensors, see `wire_manifest`; by default, they travel in their own
            dtypes.
        locate: a tensor's part on this rank, for tensors whose memory may be elsewhere.
        keeps_memory: the tensors have the same memory from one call to the next. Engines on the
            same GPUs then keep it open in between; it is not given back to the GPU before they
            close it, with the next sync or when they end. False if an `on_read` frees it.
        export: see `Export`; None for CUDA IPC.
    """

    def __init__(
        self,
        session: SyncSession,
        tensors: Mapping[str, Tensor],
        manifest: Manifest | None = None,
        *,
        locate: Callable[[Tensor], Tensor] = local_part,
        keeps_memory: bool = True,
        export: Export | None = None,
    ) -> None:
        self._session = session
        self.manifest = manifest or wire_manifest(tensors)
        rank = session.rank
        first, others = (
            {name: t for name, t in tensors.items() if is_first_holder(t, rank) == is_first}
            for is_first in (True, False)
        )
        parts = SenderParts(
            session=session,
            shards=_shards_of(rank, self.manifest, first, locate),
            replicas=_shards_of(rank, self.manifest, others, locate),
            keeps_memory=keeps_memory,
            export=export,
        )
        self._senders: dict[TransportName, Sender] = {
            name: resolve_name(transport.sender)(parts) for name, transport in TRANSPORTS.items()
        }
        self._wire = self.manifest.to_wire()

    def publish(
        self,
        pool: str,
        version: int,
        timeout_s: float,
        on_read: Callable[[], None] | None = None,
    ) -> SyncReport:
        """Transfers the tensors to the engines of `pool`; returns when they serve `version`.

        `on_read` is called when the tensors of this rank have been read, by itself or by the
        engines. These allocate their KV cache only after it has returned on every rank. None: they
        need not wait for it.

        Collective: all ranks call it. If the pool already has `version`, only the engines that lack
        it take part. An engine that has to leave the sync and still serves an older version gets
        another sync. Any failure here aborts the sync for every rank.

        Raises:
            WeightSyncError: no engine got the version, or a rank did not join or failed.
            DeadlineExceeded: `timeout_s` seconds have passed.
        """
        deadline = time.monotonic() + timeout_s
        try:
            report = self._sync(pool, version, deadline, on_read)
            while report.remaining:  # the same on every rank
                report = report.joined(self._sync(pool, version, deadline, on_read))
            return report
        finally:
            self._leave()

    def _sync(
        self, pool: str, version: int, deadline: float, on_read: Callable[[], None] | None
    ) -> SyncReport:
        session, rank = self._session, self._session.rank
        grant = session.sync(
            SyncBegin(
                pool=pool,
                version=version,
                rank=rank,
                world_size=session.world_size,
                manifest=self._wire if rank == 0 else None,
                offers={name: sender.offer() for name, sender in self._senders.items()},
                node_id=session.node_id,
                deadline=deadline,
            )
        )
        sync_id, sender = grant.sync_id, self._senders[grant.transport]
        try:
            regions = sender.send(grant, deadline)
            if regions is not None:
                if on_read is not None and not TRANSPORTS[grant.transport].reads_ranks:
                    self._leave()
                    on_read()
                    on_read = None
                filled = SyncFilled(
                    sync_id=sync_id,
                    rank=rank,
                    regions=regions,
                    network_nbytes=sender.network_nbytes,
                    is_released=on_read is None,
                    deadline=deadline,
                )
                session.sync(filled)
                if on_read is not None:
                    self._leave()
                    on_read()
            # If the sync was aborted, this raises the reason.
            return session.sync(SyncEnd(sync_id=sync_id, rank=rank, deadline=deadline))
        except BaseException as error:
            sender.close()  # the supervisor frees the memory of this sync
            # The first error is the one to raise; the lease ends the sync if no supervisor answers.
            reason = f"{type(error).__name__}: {error}"
            until = time.monotonic() + _ABORT_TIMEOUT_S
            with suppress(UmbraError):
                session.sync(SyncAbort(sync_id=sync_id, rank=rank, reason=reason, deadline=until))
            raise

    def _leave(self) -> None:
        for sender in self._senders.values():
            sender.leave()

    def close(self) -> None:
        """Unmaps the image and ends exports, which a later `publish` makes again. Idempotent."""
        for sender in self._senders.values():
            sender.close()


def _shards_of(
    rank: int, manifest: Manifest, tensors: Mapping[str, Tensor], locate: Callable[[Tensor], Tensor]
) -> RankShards:
    sources: list[ShardSource] = []
    extents: list[Extent] = []
    for entry in manifest.entries:
        tensor = tensors.get(entry.name)
        if tensor is None:
            continue
        extent = held_extent(len(sources), entry, tensor, rank)
        if extent is not None:
            sources.append(ShardSource(tensor, getattr(torch, entry.dtype)))
            extents.append(extent)
    return RankShards(rank=rank, manifest=manifest, extents=extents, sources=sources, locate=locate)
