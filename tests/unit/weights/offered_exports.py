"""Exports of ranks without a GPU (`fake_ipc`), offered to an engine as in a sync."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_ipc import FakeIpc
from torch import Tensor

from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.rank_exports import RankExports


def export_rows(ipc: FakeIpc, tensors: dict[str, Tensor], num_ranks: int) -> list[RankExports]:
    """Cuts tensors like FSDP2: runs of rows, some ranks without any."""
    manifest = manifest_of(tensors)
    per_rank: list[list[tuple[int, Tensor]]] = [[] for _ in range(num_ranks)]
    for entry in manifest.entries:
        offset = entry.offset
        for rank, part in enumerate(tensors[entry.name].chunk(num_ranks)):
            per_rank[rank].append((offset, part.clone()))
            offset += part.nbytes
    exported = [ipc.export(parts) for parts in per_rank]
    assert all(isinstance(exports, RankExports) for exports in exported)
    return [exports for exports in exported if isinstance(exports, RankExports)]


def manifest_of(tensors: dict[str, Tensor]) -> Manifest:
    return Manifest.layout(
        (name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()
    )


@asynccontextmanager
async def offered(
    tmp_path: Path, wire: Sequence[object], manifest: Manifest, *, is_staged: bool = False
) -> AsyncGenerator[tuple[dict[str, Any], SyncProgress]]:
    """The arguments of prepare_update for exports that are ready to be read."""
    fd, progress = SyncProgress.create("progress", 1, 1)
    progress.set_filled(0, len(manifest.entries))
    path = str(tmp_path / "fds")
    numbers = {"num_ranks": 1, "num_engines": 1, "engine": 0, "timeout_s": 10.0}
    buckets = {
        "fd_socket": path,
        "bucket_nbytes": 512,
        "exports": wire,
        "has_checksums": True,
        "is_staged": is_staged,
        "progress": {"name": "progress"} | numbers,
    }
    try:
        async with serve_fds(path, {"progress": fd}):
            yield buckets, progress
    finally:
        progress.close()
        os.close(fd)
