"""The images of weights that a node holds for syncs between nodes, one for each pool. Torch-free.

    coordinator ── hold_image ──▶ supervisor of a node      the sync's progress comes back

They belong to the node's supervisor, which outlives the engines that use them and ends their waits,
whichever of them was killed or is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.weights.bucket_grid import BucketGrid
from umbra.runtime.weights.image.fd_server import FdServer
from umbra.runtime.weights.image.image_memory import ImageMemory
from umbra.runtime.weights.image.sync_progress import SyncProgress

_LOOK_INTERVAL_S: Final = 0.02
# Interval of looks at a control block, whose changes notify no event loop. A shorter one takes
# processor time; with a longer one, engines are paused later.
_REPORT_INTERVAL_S: Final = 0.25
# Interval of reports, except the one that the image is filled. A shorter one costs the
# supervisor of rank 0's node a message from each node; with a longer one, engines that stand still
# are noticed later.


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


class NodeImages:
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
