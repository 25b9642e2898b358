"""The progress of a sync over several nodes, for the supervisor. Torch-free.

ranks            ── SyncProgressed ──▶    buckets read; the answer says which nodes are lost
images of nodes  ── a stream ────────▶    buckets arrived there, and loaded by engines
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, cast

from umbra.runtime.errors import ProtocolError, UmbraError, brief
from umbra.runtime.weights.sync_calls import SyncProgressed
from umbra.runtime.weights.transports.shared_memory.node_images import ImageOrder

logger = logging.getLogger(__name__)


class ImageHolder(Protocol):
    def hold(
        self, node_id: str, order: ImageOrder
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """See `NodeImages.hold`; the end of the block ends the generator."""
        ...


class ImageFollower:
    """The image of one node, as the lead follows it. `run` lives as long as the node takes part.

    Args:
        gone: gets `idx`, the node's index, when the node stops taking part.
        engines: numbers of the node's engines in the sync. The first one is its receiver.
        has_receiver: whether there are ranks on other nodes, from which it receives.

    Attributes:
        details: facts for processes of the node to map it; empty until then.
        holds: the image's contents as the sync begins, see `ImageMemory`.
        settled: set once it is mapped, or gone.
        is_gone: whether the engines of this node cannot get the version in this sync.
    """

    def __init__(
        self,
        idx: int,
        gone: list[int],
        node_id: str,
        order: ImageOrder,
        engines: Sequence[int],
        *,
        has_receiver: bool,
    ) -> None:
        self.idx = idx
        self.node_id = node_id
        self.engines = engines
        self.has_receiver = has_receiver
        self.details: Mapping[str, Any] = {}
        self.holds = ""
        self.has_lost = False
        self.settled = asyncio.Event()
        self._stopped = [False] * len(engines)
        self.is_gone = False
        self._gone = gone
        self._order = order
        self._num_buckets = order.grid.num_buckets
        self._filled = 0
        self._loaded = [0] * len(engines)
        self._following: asyncio.Task[None] | None = None

    async def run(self, images: ImageHolder) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._following = tasks.create_task(self._follow(images))
            if self.is_gone:
                self._following.cancel()

    def end(self) -> None:
        """Ends all waits for the sync on this node. Idempotent."""
        self._note_gone()
        if self._following is not None:
            self._following.cancel()

    def dismiss(self, engine: int) -> None:
        """Called when this engine is lost. Others cannot continue if it still had to receive."""
        self.has_lost = True
        if self._receives(engine) and self._filled < self._num_buckets:
            self.end()

    def num_loaded(self, engine: int) -> int:
        return self._loaded[self.engines.index(engine)]

    @property
    def num_filled(self) -> int:
        return self._filled

    def may_load(self, engine: int) -> bool:
        """Whether the image is filled, is gone, or the engine could not receive: then its load
        raises the reason."""
        is_filled = self._filled == self._num_buckets
        return is_filled or self.is_gone or self._stopped[self.engines.index(engine)]

    def has_to_receive(self, engine: int, num_read: int) -> bool:
        """Whether an engine has buckets to receive: of `num_read`, which all ranks have read."""
        return self._receives(engine) and self._filled < num_read

    def has_work(self, engine: int, num_read: int) -> bool:
        """Whether an engine has buckets to load, or to receive."""
        has_to_load = self.num_loaded(engine) < self._filled
        return has_to_load or self.has_to_receive(engine, num_read)

    def _receives(self, engine: int) -> bool:
        return self.has_receiver and engine == self.engines[0]

    async def _follow(self, images: ImageHolder) -> None:
        try:
            async with images.hold(self.node_id, self._order) as states:
                async for state in states:
                    self._enter(state)
        except UmbraError as error:
            logger.warning("the image of weights on node %s is lost: %s", self.node_id, error)
        finally:
            self._note_gone()

    def _note_gone(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self._gone.append(self.idx)
        self.settled.set()

    def _enter(self, state: Mapping[str, Any]) -> None:
        match state:
            case {"image": dict(), "fd_socket": str(), "progress": dict(), "holds": str(holds)}:
                self.details, self.holds = state, holds
                self.settled.set()
            case {"filled": int(filled), "loaded": [*loaded], "stopped": [*stopped]} if (
                len(loaded) == len(stopped) == len(self.engines)
            ):
                self._filled, self._loaded = filled, cast("list[int]", loaded)
                self._stopped = cast("list[bool]", stopped)
            case _:
                raise ProtocolError(f"not the state of an image: {brief(state)}")


class LinkProgress:
    """Implements `TransferProgress` by the nodes' images. `gone` are indices of nodes."""

    def __init__(self, num_ranks: int, nodes: Sequence[ImageFollower], gone: Sequence[int]) -> None:
        self.is_aborted = False
        self._filled = [0] * num_ranks
        self._num_ranks_at = {0: num_ranks}  # by the number of buckets that they have read
        self._num_read = 0  # by all
        self._nodes = nodes
        self._gone = gone
        self._by_engine = {engine: node for node in nodes for engine in node.engines}

    def observe(self, report: SyncProgressed) -> dict[str, Any]:
        """Answers a rank: {"is_aborted": bool, "gone": [index of a node, ...]}. A rank sends
        nothing to nodes that are gone. Raises ProtocolError for an unknown rank."""
        if not 0 <= report.rank < len(self._filled):
            raise ProtocolError(f"rank {report.rank} reports to a sync of {len(self._filled)}")
        self._move(report.rank, report.num_filled)
        return {"is_aborted": self.is_aborted, "gone": list(self._gone)}

    def _move(self, rank: int, num_filled: int) -> None:
        """Ranks are at few different numbers, however many ranks there are."""
        at, before = self._num_ranks_at, self._filled[rank]
        self._filled[rank] = num_filled
        at[num_filled] = at.get(num_filled, 0) + 1
        at[before] -= 1
        if not at[before]:
            del at[before]
        self._num_read = min(at)

    def num_filled(self) -> list[int]:
        return self._filled

    def num_loaded(self, engine: int) -> int:
        return self._by_engine[engine].num_loaded(engine)

    def has_work(self, engine: int) -> bool:
        return self._by_engine[engine].has_work(engine, self._num_read)

    def may_load(self, engine: int) -> bool:
        """Whether everything is in the image of its node, or it is known that not all will be."""
        return self._by_engine[engine].may_load(engine)

    def num_received(self, engine: int) -> int:
        """Buckets in the image of its node."""
        return self._by_engine[engine].num_filled

    def has_to_receive(self, engine: int) -> bool:
        """Whether it receives for its node, and not everything that ranks have read is there."""
        return self._by_engine[engine].has_to_receive(engine, self._num_read)

    def is_cut_off(self, engine: int) -> bool:
        return self._by_engine[engine].is_gone

    def abort(self) -> None:
        self.is_aborted = True
        for node in self._nodes:
            node.end()

    def dismiss(self, engine: int) -> None:
        self._by_engine[engine].dismiss(engine)
