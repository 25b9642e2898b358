"""A weight sync to engines in this process, with the real publisher, image and receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

from engine_runs import Engine
from torch import Tensor

from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.image.image_memory import ImageMemory, numbered
from umbra.runtime.weights.manifest import BucketGrid, Manifest
from umbra.runtime.weights.shards import wire_manifest
from umbra.runtime.weights.sync_messages import (
    Answer,
    SyncAbort,
    SyncAnswer,
    SyncBegin,
    SyncEnd,
    SyncFilled,
    SyncGrant,
    SyncMessage,
    SyncReport,
)

DEADLINE_S = 60.0


class Outcome(NamedTuple):
    """Bytes that the engine has loaded, and the checksums that differ."""

    nbytes: int
    mismatches: list[str]


class LocalSync:
    """The session of the only rank, whose syncs drive one engine; blocks in the caller's thread.

    Args:
        details: of the image, for an engine.
        tamper: called with the regions before they are verified.
        begun: called between `prepare_update` and `load`.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        details: Mapping[str, Any],
        bucket_nbytes: int,
        tamper: Callable[[list[list[int | None]]], None],
        begun: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._tamper = tamper
        self._begun = begun
        self._regions: list[list[int | None]] = []
        self._buckets: dict[str, Any] = {
            "bucket_nbytes": bucket_nbytes,
            **details,
            "progress": details["progress"] | {"timeout_s": DEADLINE_S},
        }
        self._loading: Future[dict[str, int]]
        self.verified: dict[str, Any] = {}

    rank = 0
    world_size = 1
    node_id = ""
    tcp_host = ""
    fd_socket = ""

    def raise_if_lost(self) -> None:
        pass

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        return cast("Answer", self._answer(message))

    def _answer(self, message: SyncMessage[Any]) -> SyncAnswer:
        match message:
            case SyncBegin():
                return self._begin(message)
            case SyncFilled():
                self._regions = [list(region) for region in message.regions]
                self._nbytes = self._loading.result(DEADLINE_S)["nbytes"]
            case SyncEnd():
                return self._end()
            case SyncAbort():
                self._call(self._engine.abort_update())
            case _:
                raise AssertionError("memfd has its progress in shared memory")
        return None

    def _begin(self, message: SyncBegin) -> SyncGrant:
        assert message.manifest is not None
        self._call(self._engine.prepare_update(message.version, message.manifest, self._buckets))
        self._begun()
        self._loading = asyncio.run_coroutine_threadsafe(self._engine.load(), self._loop)
        nbytes = Manifest.from_wire(message.manifest).nbytes
        bucket_nbytes: int = self._buckets["bucket_nbytes"]
        return SyncGrant(
            sync_id="sync",
            transport="memfd",
            bucket_nbytes=bucket_nbytes,
            num_buckets=BucketGrid(nbytes, bucket_nbytes).num_buckets,
            has_checksums=True,
            details=self._buckets,
        )

    def _end(self) -> SyncReport:
        self._tamper(self._regions)
        mismatches = self._call(self._engine.verify_update(self._regions))
        self.outcome = Outcome(self._nbytes, mismatches)
        if mismatches:
            self._call(self._engine.abort_update())
        else:
            self._call(self._engine.commit_update())
        return SyncReport(
            version=0,
            transport="memfd",
            engines={},
            failed={},
            remaining=[],
            network_nbytes=0,
            prepare_s=0.0,
            transfer_s=0.0,
            verify_s=0.0,
            resume_s=0.0,
        )

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)


async def publish(
    engine: Engine,
    tensors: Mapping[str, Tensor],
    version: int,
    folder: Path,
    *,
    bucket_nbytes: int = 1 << 14,
    lora: LoraSpec | None = None,
    tamper: Callable[[list[list[int | None]]], None] = lambda regions: None,
    begun: Callable[[], None] = lambda: None,
) -> Outcome:
    """Carries `tensors` to a paused (or fresh) engine and resumes it, if the checksums agree."""
    manifest = wire_manifest(tensors, lora=lora)
    grid = BucketGrid(manifest.nbytes, bucket_nbytes)
    async with serve_fds(str(folder / "fds")) as server:
        memory = ImageMemory("pool", server)
        try:
            async with memory.opened(grid, 1, 1) as (details, _):
                loop, own = asyncio.get_running_loop(), numbered(details, 1)[0]
                sync = LocalSync(engine, loop, own, bucket_nbytes, tamper, begun)
                with closing(WeightPublisher(sync, tensors, manifest)) as publisher:
                    await asyncio.to_thread(publisher.publish, "pool", version, DEADLINE_S)
        finally:
            memory.close()
    return sync.outcome


def regions_nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
