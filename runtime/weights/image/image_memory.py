from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from umbra.runtime.process.host_memory import create_memory, free_pages
from umbra.runtime.weights.image.fd_server import FdServer
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.manifest import BucketGrid
from umbra.runtime.weights.transport import (
    Layout,
    LayoutOrder,
    ProbedEngine,
    Problem,
    RankOffer,
    find_distance,
)

_SLICE_NBYTES: Final = 64 << 20
# Freed at a time, during which the event loop does nothing else: about 15 ms.
_LOOK_INTERVAL_S: Final = 0.02
# Interval of looks at a control block, whose changes notify no event loop. A shorter one takes
# processor time; with a longer one, engines are paused later.
_REPORT_INTERVAL_S: Final = 0.25
# Interval of reports, except the one that the image is filled. A shorter one costs the
# supervisor of rank 0's node a message from each node; with a longer one, engines that stand still
# are noticed later.


class ImageMemory:
    """The shared memory of a pool's syncs on one node: the image, and a control block for each
    sync. Owned by the node's supervisor, which outlives ranks and engines.

    The image stays from one sync to the next, so that no process has to map it again. It is freed
    if the next one has another size, and after a sync that was not filled to the end, because some
    process may still be writing. Ranks allocate its pages as they fill it. Names are never reused,
    because processes stay mapped to old images. The image's contents have the name that the last
    sync to fill it chose, or "".
    """

    def __init__(self, pool: str, fd_server: FdServer) -> None:
        self._pool = pool
        self._fd_server = fd_server
        self._turn = asyncio.Lock()
        self._name = ""
        self._fd = -1
        self._nbytes = 0
        self._holds = ""

    @asynccontextmanager
    async def opened(
        self, grid: BucketGrid, num_ranks: int, num_engines: int, contents: str = ""
    ) -> AsyncGenerator[tuple[dict[str, Any], SyncProgress]]:
        """The image and a control block for one sync, offered inside the block, after the end of
        the sync before it.

        Yields facts for ranks and engines to map both, with the image's contents in "holds", and
        the progress. `contents` names those of the image once the sync has filled it. Raises
        WeightSyncError if the system has no memory or descriptors for it.
        """
        async with self._turn:
            await self._make(max(grid.image_nbytes, 1))  # nothing cannot be mapped
            image = {"name": self._name, "nbytes": self._nbytes}
            holds, self._holds = self._holds, ""
            with self.progress(num_ranks, num_engines) as (wire, progress):
                try:
                    yield {**wire, "image": image, "holds": holds}, progress
                finally:
                    if min(progress.num_filled()) < grid.num_buckets:
                        await self.free()
                    else:
                        self._holds = contents

    @contextmanager
    def progress(
        self, num_ranks: int, num_engines: int
    ) -> Generator[tuple[dict[str, Any], SyncProgress]]:
        """A control block for one sync, offered inside the block, behind facts for ranks
        and engines to map it. Raises WeightSyncError if the system has no memory or
        descriptors for it."""
        name = f"{self._pool}-{secrets.token_hex(4)}-progress"
        fd, progress = SyncProgress.create(name, num_ranks, num_engines)
        self._fd_server.offer({name: fd})
        wire = {"name": name, "num_ranks": num_ranks, "num_engines": num_engines}
        try:
            yield {"fd_socket": self._fd_server.socket_path, "progress": wire}, progress
        finally:
            self._fd_server.withdraw([name])
            progress.close()
            os.close(fd)

    async def _make(self, nbytes: int) -> None:
        if nbytes == self._nbytes:
            return
        await self.free()
        name = f"{self._pool}-{secrets.token_hex(4)}"
        self._fd = create_memory(name, nbytes, is_allocated=False)
        self._name, self._nbytes, self._holds = name, nbytes, ""
        self._fd_server.offer({name: self._fd})

    async def free(self) -> None:
        """Frees the image, although processes may still have it mapped, in slices: a large one
        takes seconds. If it is cancelled, the rest is free once no process has it mapped.
        A second call does nothing."""
        if self._fd < 0:
            return
        fd, nbytes = self._fd, self._nbytes
        self._fd_server.withdraw([self._name])
        self._fd, self._nbytes = -1, 0
        try:
            for start in range(0, nbytes, _SLICE_NBYTES):
                free_pages(fd, start, min(_SLICE_NBYTES, nbytes - start))
                await asyncio.sleep(0)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the image, which is freed once no process has it mapped. Idempotent."""
        if self._fd >= 0:
            self._fd_server.withdraw([self._name])
            os.close(self._fd)
        self._fd, self._nbytes = -1, 0


def numbered(details: Mapping[str, Any], num_engines: int) -> dict[int, Mapping[str, Any]]:
    progress = details["progress"]
    return {
        number: {**details, "progress": progress | {"engine": number}}
        for number in range(num_engines)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOrder:
    """The image of a pool, for one sync, with `num_engines` of this node."""

    pool: str
    image_nbytes: int
    bucket_nbytes: int
    num_ranks: int
    num_engines: int
    contents: str = ""

    @property
    def grid(self) -> BucketGrid:
        return BucketGrid(self.image_nbytes, self.bucket_nbytes)


class ImageHolder(Protocol):
    """The images on the nodes of a job, as the lead follows them."""

    def hold(
        self, node_id: str, order: ImageOrder
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """See `NodeImages.hold`; the end of the block ends the generator."""
        ...


@dataclass(frozen=True, slots=True)
class PlanParts:
    """A pool, as each transport's plan needs it. The pool's coordinator owns `memory`, of which it
    frees the image when a sync takes another transport than the last one. With `is_staged`, engines
    that read the ranks' memory do that while they generate, if they can."""

    pool: str
    memory: ImageMemory
    images: ImageHolder
    is_staged: bool


class ImagePlan:
    """Shared memory, the supervisor's part: one image, which works on any node. Torch-free."""

    def __init__(self, parts: PlanParts) -> None:
        self._memory = parts.memory

    async def find_problem(
        self, ranks: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        return find_distance(ranks, engines)

    def can_reach(self, engine: ProbedEngine) -> bool:
        return True

    @asynccontextmanager
    async def lay_out(self, order: LayoutOrder) -> AsyncGenerator[Layout]:
        grid = BucketGrid(order.manifest.nbytes, order.bucket_nbytes)
        numbers = len(order.ranks), len(order.engines)
        async with self._memory.opened(grid, *numbers) as (details, progress):
            yield Layout(
                rank_details=lambda rank: details,
                engine_details=numbered(details, len(order.engines)),
                progress=progress,
                num_buckets=grid.num_buckets,
            )


class NodeImages:
    """The images of weights that a node holds for syncs between nodes, one for each pool.

    coordinator ── hold_image ──▶ supervisor of a node      the sync's progress comes back

    They belong to the node's supervisor, which outlives the engines that use them and ends their
    waits, whichever of them was killed or is stopped.
    """

    def __init__(self, fd_server: FdServer) -> None:
        self._fd_server = fd_server
        self._memories: dict[str, ImageMemory] = {}

    async def hold(self, order: ImageOrder) -> AsyncGenerator[dict[str, Any], None]:
        """Offers an image and a control block as long as this generator lives. Its end ends all
        waits for the sync.

        Yields:
            First facts for processes of this node to map both, with the image's contents. Then,
                after every change, {"filled": buckets that every rank has filled, "loaded":
                [buckets of each engine, ...], "stopped": [whether each was made to stop, ...]}.
        """
        made = ImageMemory(order.pool, self._fd_server)
        memory = self._memories.setdefault(order.pool, made)
        numbers = order.num_ranks, order.num_engines
        async with memory.opened(order.grid, *numbers, order.contents) as (details, progress):
            try:
                yield details
                async for state in _changes(progress, order):
                    yield state
            finally:
                progress.abort()

    def close(self) -> None:
        for memory in self._memories.values():
            memory.close()


async def _changes(
    progress: SyncProgress, order: ImageOrder
) -> AsyncGenerator[dict[str, Any], None]:
    last: dict[str, Any] = {}
    report_at, num_buckets = 0.0, order.grid.num_buckets
    while True:
        state = {
            "filled": min(progress.num_filled()),
            "loaded": [progress.num_loaded(engine) for engine in range(order.num_engines)],
            "stopped": [progress.is_stopped(engine) for engine in range(order.num_engines)],
        }
        is_newly_filled = state["filled"] == num_buckets != last.get("filled")
        if state != last and (is_newly_filled or time.monotonic() >= report_at):
            report_at = time.monotonic() + _REPORT_INTERVAL_S
            yield state
            last = state
        await asyncio.sleep(_LOOK_INTERVAL_S)
