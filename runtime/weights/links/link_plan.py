"""Between nodes, the supervisor's part: images of the nodes, and where ranks meet receivers.

    rank 0 ──────────────── fills ───────────────┐
    rank 1, on another node ══ link ══▶ engine a ┴─▶ image of the node ─▶ engine a
                                                                       └▶ engine b

Each node that has engines has one image. Ranks of this node fill it themselves. Other ranks' shards
reach it through its receiver, the first engine of the node that takes part, so that bytes cross the
network once for each node.

A rank may send changes to a node whose image holds the shards that the rank sent last. The node's
supervisor knows the image's contents, and the rank its own. Each sync names its contents by a name
that is not used again, so that the two cannot be confused. Torch-free.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from umbra.runtime.errors import ProtocolError, UmbraError, WeightSyncError, brief
from umbra.runtime.weights.image.image_memory import ImageHolder, ImageOrder, PlanParts, numbered
from umbra.runtime.weights.manifest import BucketGrid
from umbra.runtime.weights.sync_messages import LinkState, SyncProgressed
from umbra.runtime.weights.transport import (
    Layout,
    LayoutOrder,
    ProbedEngine,
    Problem,
    RankOffer,
)

logger = logging.getLogger(__name__)


class LinkPlan:
    def __init__(self, parts: PlanParts) -> None:
        self._pool = parts.pool
        self._images = parts.images
        self._sound: dict[str, str] = {}  # by node: contents that none of its engines has refused

    async def find_problem(
        self, ranks: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        for rank in ranks:
            is_alone = all(engine.node_id == rank.node_id for engine in engines)
            if not (is_alone or rank.offer):
                return Problem(f"rank {rank.rank} has no address at which other nodes reach it")
        return None

    def can_reach(self, engine: ProbedEngine) -> bool:
        return True

    @asynccontextmanager
    async def lay_out(self, order: LayoutOrder) -> AsyncGenerator[Layout]:
        """Engines of a node that makes no image in time cannot take part."""
        gone: list[int] = []
        contents = secrets.token_hex(16) if order.keeps_sent else ""
        nodes = _followers(self._pool, order, gone, contents)
        has_image = False
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(node.run(self._images)) for node in nodes]
            try:
                await _settle(nodes, order.timeout_s)
                has_image = not nodes or not all(node.is_gone for node in nodes)
                if has_image:
                    bases = self._bases(order, nodes)
                    yield _layout(order, nodes, gone, contents, bases)
            finally:
                self._sound |= {n.node_id: "" if n.has_lost else contents for n in nodes}
                for task in following:
                    task.cancel()
        if not has_image:  # an error inside the group would be one of several
            names = ", ".join(node.node_id for node in nodes)
            raise WeightSyncError(f"no image could be made on the nodes {names}")

    def _bases(self, order: LayoutOrder, nodes: Sequence[ImageFollower]) -> list[str]:
        """For each node, the contents of its image that changes may be written to; "" for none.
        After a sync in which an engine of its node was lost, an image is not trusted: its checksums
        may have been wrong."""
        return [
            node.holds
            if order.sends_deltas and node.holds == self._sound.get(node.node_id, "")
            else ""
            for node in nodes
        ]


async def _settle(nodes: Sequence[ImageFollower], timeout_s: float) -> None:
    """Returns once each node has an image or is gone."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for node in nodes:
                await node.settled.wait()
    for node in nodes:
        if not node.settled.is_set():
            node.end()


def _followers(
    pool: str, order: LayoutOrder, gone: list[int], contents: str
) -> list[ImageFollower]:
    by_node: dict[str, list[int]] = {}
    for number, engine in enumerate(order.engines):
        by_node.setdefault(engine.node_id, []).append(number)
    return [
        ImageFollower(
            idx,
            gone,
            node_id,
            ImageOrder(
                pool=pool,
                image_nbytes=order.manifest.nbytes,
                bucket_nbytes=order.bucket_nbytes,
                num_ranks=len(order.ranks),
                num_engines=len(engines),
                contents=contents,
            ),
            engines,
            has_receiver=any(rank.node_id != node_id for rank in order.ranks),
        )
        for idx, (node_id, engines) in enumerate(by_node.items())
    ]


def _layout(
    order: LayoutOrder,
    nodes: Sequence[ImageFollower],
    gone: Sequence[int],
    contents: str,
    bases: Sequence[str],
) -> Layout:
    secret = secrets.token_hex(16)  # of this sync: whoever knows it may receive the weights
    own = {node.node_id: idx for idx, node in enumerate(nodes)}
    engine_details: dict[int, Mapping[str, Any]] = {}
    for idx, node in enumerate(nodes):
        if node.is_gone:
            continue
        details = numbered(node.details, len(node.engines))
        if node.has_receiver:
            ranks = [
                (rank.rank, rank.offer) for rank in order.ranks if rank.node_id != node.node_id
            ]
            receives = {"key": f"{secret}/{idx}", "ranks": ranks, "holds": node.holds}
            details[0] = {**details[0], "receives": receives}
        engine_details |= {engine: details[n] for n, engine in enumerate(node.engines)}

    def rank_details(rank: int) -> Mapping[str, Any]:
        idx = own.get(order.ranks[rank].node_id)
        image: Mapping[str, Any] = {} if idx is None else nodes[idx].details
        return {
            "key": secret,
            "num_nodes": len(nodes),
            "own_node": idx,
            "image": image,
            "contents": contents,
            "bases": bases,
        }

    return Layout(
        rank_details=rank_details,
        engine_details=engine_details,
        progress=LinkProgress(len(order.ranks), nodes, gone),
        num_buckets=BucketGrid(order.manifest.nbytes, order.bucket_nbytes).num_buckets,
    )


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
        changed: set, and replaced, by each change here or of what ranks have read.
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
        self.changed = asyncio.Event()
        self._stopped = [False] * len(engines)
        self.is_gone = False
        self._gone = gone
        self._order = order
        self._num_buckets = order.grid.num_buckets
        self.num_filled = 0
        self._num_read = 0  # by all ranks
        self._loaded = [0] * len(engines)
        self._following: asyncio.Task[None]

    async def run(self, images: ImageHolder) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._following = tasks.create_task(self._follow(images))

    def end(self) -> None:
        """Ends all waits for the sync on this node. Idempotent."""
        self._note_gone()
        self._following.cancel()

    def dismiss(self, engine: int) -> None:
        """Called when this engine is lost. Others cannot continue if it still had to receive."""
        self.has_lost = True
        if self._receives(engine) and self.num_filled < self._num_buckets:
            self.end()

    def num_loaded(self, engine: int) -> int:
        return self._loaded[self.engines.index(engine)]

    def may_load(self, engine: int) -> bool:
        """Whether the image is filled, is gone, or the engine could not receive: then its load
        raises the reason."""
        is_filled = self.num_filled == self._num_buckets
        return is_filled or self.is_gone or self._stopped[self.engines.index(engine)]

    def has_to_receive(self, engine: int) -> bool:
        """Whether an engine receives for the node, and not all that ranks have read is there."""
        return self._receives(engine) and self.num_filled < self._num_read

    def has_work(self, engine: int) -> bool:
        """Whether an engine has buckets to load, or to receive."""
        return self.num_loaded(engine) < self.num_filled or self.has_to_receive(engine)

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
            self.note_change()
        self.settled.set()

    def note_read(self, num_buckets: int) -> None:
        """Called when all ranks have read more buckets."""
        self._num_read = num_buckets
        self.note_change()

    def note_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _enter(self, state: Mapping[str, Any]) -> None:
        match state:
            case {"image": dict(), "fd_socket": str(), "progress": dict(), "holds": str(holds)}:
                self.details, self.holds = state, holds
                self.settled.set()
            case {"filled": int(filled), "loaded": [*loaded], "stopped": [*stopped]} if (
                len(loaded) == len(stopped) == len(self.engines)
            ):
                self.num_filled, self._loaded = filled, cast("list[int]", loaded)
                self._stopped = cast("list[bool]", stopped)
                self.note_change()
            case _:
                raise ProtocolError(f"not the state of an image: {brief(state)}")


class LinkProgress:
    """Implements `TransferProgress` by the nodes' images. `gone` are indices of nodes.

    ranks            ── SyncProgressed ──▶    buckets read; the answer says which nodes are lost
    images of nodes  ── a stream ────────▶    buckets arrived there, and loaded by engines
    """

    def __init__(self, num_ranks: int, nodes: Sequence[ImageFollower], gone: Sequence[int]) -> None:
        self.is_aborted = False
        self._filled = [0] * num_ranks
        self._num_ranks_at = {0: num_ranks}  # by the number of buckets that they have read
        self._num_read = 0  # by all
        self._nodes = nodes
        self._gone = gone
        self._by_engine = {engine: node for node in nodes for engine in node.engines}

    def observe(self, report: SyncProgressed) -> LinkState:
        """Raises ProtocolError for an unknown rank."""
        if not 0 <= report.rank < len(self._filled):
            raise ProtocolError(f"rank {report.rank} reports to a sync of {len(self._filled)}")
        self._move(report.rank, report.num_filled)
        return LinkState(is_aborted=self.is_aborted, gone=list(self._gone))

    def _move(self, rank: int, num_filled: int) -> None:
        """Ranks are at few different numbers, however many ranks there are."""
        at, before = self._num_ranks_at, self._filled[rank]
        self._filled[rank] = num_filled
        at[num_filled] = at.get(num_filled, 0) + 1
        at[before] -= 1
        if not at[before]:
            del at[before]
        if self._num_read != (num_read := min(at)):
            self._num_read = num_read
            for node in self._nodes:
                node.note_read(num_read)

    def num_filled(self) -> list[int]:
        return self._filled

    def num_loaded(self, engine: int) -> int:
        return self._by_engine[engine].num_loaded(engine)

    def has_work(self, engine: int) -> bool:
        return self._by_engine[engine].has_work(engine)

    def node_of(self, engine: int) -> ImageFollower:
        return self._by_engine[engine]

    def is_cut_off(self, engine: int) -> bool:
        return self._by_engine[engine].is_gone

    def abort(self) -> None:
        self.is_aborted = True
        for node in self._nodes:
            node.end()

    def dismiss(self, engine: int) -> None:
        self._by_engine[engine].dismiss(engine)
