"""The progress of a sync over several nodes, for the supervisor. Torch-free.

ranks            ── SyncProgressed ──▶  what they have read; the answer says who is lost
rings of nodes   ── a stream ────────▶  what has arrived there, and what engines have loaded
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol, cast

from umbra.runtime.errors import ProtocolError, UmbraError, brief
from umbra.runtime.weights.sync_calls import SyncProgressed
from umbra.runtime.weights.transports.shared_memory.bucket_grid import NUM_BUFFERS
from umbra.runtime.weights.transports.shared_memory.node_rings import RingOrder

logger = logging.getLogger(__name__)


class RingHolder(Protocol):
    """Reaches the `NodeRings` of every node of the job, by node id."""

    def hold(
        self, node_id: str, order: RingOrder
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """See `NodeRings.hold`; the end of the block ends the generator."""
        ...

    async def dismiss(self, node_id: str, key: str, engine: int) -> None:
        """See `NodeRings.dismiss`."""
        ...


class RingFollower:
    """The ring of one node, as the supervisor of rank 0's follows it. `run` lives until the ring is
    gone.

    Args:
        gone: gets `idx`, the node's index, when the ring is gone.
        engines: numbers of the node's engines in the sync. The first one is its receiver.
        has_receiver: whether there are ranks on other nodes, from which it receives.
        num_buckets: of the sync.

    Attributes:
        details: what processes of the node need to map it; empty until then.
        settled: set once it is mapped, or gone.
        is_gone: the engines of this node cannot get the version in this sync.
    """

    def __init__(
        self,
        idx: int,
        gone: list[int],
        node_id: str,
        order: RingOrder,
        engines: Sequence[int],
        num_buckets: int,
        *,
        has_receiver: bool,
    ) -> None:
        self.idx = idx
        self.node_id = node_id
        self.engines = engines
        self.has_receiver = has_receiver
        self.details: Mapping[str, Any] = {}
        self.settled = asyncio.Event()
        self.is_gone = False
        self._gone = gone
        self._order = order
        self._num_buckets = num_buckets
        self._filled = 0
        self._loaded = [0] * len(engines)
        self._dismissed: set[int] = set()
        self._dismissals: asyncio.Queue[int] = asyncio.Queue()
        self._following: asyncio.Task[None] | None = None

    async def run(self, rings: RingHolder) -> None:
        """Holds and follows the ring until `end`."""
        async with asyncio.TaskGroup() as tasks:
            self._following = tasks.create_task(self._follow(rings))
            sending = tasks.create_task(self._send_dismissals(rings))
            self._following.add_done_callback(lambda _: sending.cancel())
            if self.is_gone:
                self._following.cancel()

    def end(self) -> None:
        """Makes everybody stop who waits in the ring. Idempotent."""
        self._note_gone()
        if self._following is not None:
            self._following.cancel()

    def dismiss(self, engine: int) -> None:
        """Makes nobody wait for this engine, which is lost. Nor can the others of the node continue
        if it received for them."""
        number = self.engines.index(engine)
        self._dismissed.add(number)
        if self.has_receiver and number == 0 and self._filled < self._num_buckets:
            self.end()
        else:
            self._dismissals.put_nowait(number)

    def num_loaded(self, engine: int) -> int:
        return self._loaded[self.engines.index(engine)]

    def has_work(self, engine: int, num_read: int) -> bool:
        """Whether an engine has buckets to load, or to receive: of `num_read`, which all ranks have
        read."""
        number = self.engines.index(engine)
        if self._loaded[number] < self._filled:
            return True
        slowest = min(
            (n for idx, n in enumerate(self._loaded) if idx not in self._dismissed),
            default=self._filled,
        )
        has_room = self._filled < slowest + NUM_BUFFERS
        return self.has_receiver and number == 0 and has_room and self._filled < num_read

    async def _follow(self, rings: RingHolder) -> None:
        try:
            async with rings.hold(self.node_id, self._order) as states:
                async for state in states:
                    self._enter(state)
        except UmbraError as error:
            logger.warning("the ring of weights on node %s is lost: %s", self.node_id, error)
        finally:
            self._note_gone()

    def _note_gone(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self._gone.append(self.idx)
        self.settled.set()

    def _enter(self, state: Mapping[str, Any]) -> None:
        match state:
            case {"names": [*_], "fd_socket": str(), "progress": dict()}:
                self.details = state
                self.settled.set()
            case {"filled": int(filled), "loaded": [*loaded]} if len(loaded) == len(self._loaded):
                self._filled, self._loaded = filled, cast("list[int]", loaded)
            case _:
                raise ProtocolError(f"not the state of a ring: {brief(state)}")

    async def _send_dismissals(self, rings: RingHolder) -> None:
        while True:
            number = await self._dismissals.get()
            with suppress(UmbraError):  # the node is lost, which ends the stream
                await rings.dismiss(self.node_id, self._order.key, number)


class LinkProgress:
    """Implements `TransferProgress`.

    Args:
        nodes: the rings of all nodes that have engines of the sync.
        gone: indices of those that are gone.
    """

    def __init__(self, num_ranks: int, nodes: Sequence[RingFollower], gone: Sequence[int]) -> None:
        self.is_aborted = False
        self._filled = [0] * num_ranks
        self._num_ranks_at = {0: num_ranks}  # by the number of buckets that they have read
        self._num_read = 0  # by all
        self._nodes = nodes
        self._gone = gone
        self._by_engine = {engine: node for node in nodes for engine in node.engines}

    def observe(self, report: SyncProgressed) -> dict[str, Any]:
        """Returns the answer to a rank: {"is_aborted": bool, "gone": [index of a node, ...]}. A
        rank sends nothing to nodes that are gone.

        Raises:
            ProtocolError: there is no such rank.
        """
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

    def is_cut_off(self, engine: int) -> bool:
        return self._by_engine[engine].is_gone

    def abort(self) -> None:
        self.is_aborted = True
        for node in self._nodes:
            node.end()

    def dismiss(self, engine: int) -> None:
        self._by_engine[engine].dismiss(engine)
