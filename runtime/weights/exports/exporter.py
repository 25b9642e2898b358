from __future__ import annotations

from dataclasses import replace

import torch

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.exports.ipc_memory import MemoryExporter
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.rank_exports import Offer, RankExports
from umbra.runtime.weights.shards import SenderParts, ShardReader
from umbra.runtime.weights.sync_messages import Region, SyncGrant, remaining_s


class ExportSender:
    """CUDA IPC, a rank's part: exports its tensors and replicas, which stay in memory until the
    engines have loaded, or until the next sync with `keeps_memory`."""

    network_nbytes = 0

    def __init__(self, parts: SenderParts) -> None:
        self._shards = parts.shards
        self._replicas = parts.replicas
        exporter = MemoryExporter(parts.session.fd_socket)
        self._export = parts.export or exporter.export
        self._release = exporter.release  # ends holds on memory that the rank may free
        self._keeps_memory = parts.keeps_memory
        self._exported: Offer = ""
        self._offer: bytes | str = ""

    def offer(self) -> bytes | str:
        """The exports of this rank in their wire form, or why there are none; the same object as
        long as neither the tensors nor their memory have changed."""
        exported = self._export(self._shards.located(), self._replicas.located())
        if exported is not self._exported:
            self._exported = exported
            if isinstance(exported, RankExports):
                self._offer = replace(exported, keeps_memory=self._keeps_memory).to_wire()
            else:
                self._offer = exported
        return self._offer

    @torch.no_grad()
    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Reports that all tensors are ready, as since the offer; with checksums,
        also the replicas."""
        shards = self._shards
        num_entries = len(shards.manifest.entries)
        if num_entries != grant.num_buckets:
            raise ProtocolError(
                f"rank {shards.rank} publishes {num_entries} tensors, "
                f"rank 0 {grant.num_buckets}: their tensors differ"
            )
        left_s = remaining_s(deadline)
        fd_socket, wire = grant.details["fd_socket"], grant.details["progress"]
        progress = SyncProgress.receive_open(fd_socket, wire, left_s)
        if progress is None:
            return None
        try:
            progress.set_filled(shards.rank, num_entries)
            if not grant.has_checksums:
                return [(extent.offset, extent.nbytes, None) for extent in shards.extents]
            return [
                (extent.offset, extent.nbytes, checksum)
                for held in (shards, self._replicas)
                for extent, checksum in zip(
                    held.extents, ShardReader(held).read_checksums(), strict=True
                )
            ]
        finally:
            progress.close()

    def leave(self) -> None:
        if not self._keeps_memory:
            self._release()

    def close(self) -> None:
        self._release()
