"""Between nodes, the supervisor's part: an image on each node, and where ranks meet its
receiver. Torch-free.

    rank 0 ──────────────── fills ───────────────┐
    rank 1, on another node ══ link ══▶ engine a ┴─▶ image of the node ─▶ engine a
                                                                       └▶ engine b

Each node that has engines has one image. Ranks of this node fill it themselves. Other ranks' shards
reach it through its receiver, the first engine of the node that takes part, so that bytes cross the
network once for each node.

A rank may send changes to a node whose image holds the shards that the rank sent last. The node's
supervisor knows the image's contents, and the rank its own. Each sync names its contents by a name
that is not used again, so that the two cannot be confused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.base import (
    Layout,
    LayoutOrder,
    ProbedEngine,
    Problem,
    RankOffer,
    TransportName,
)
from umbra.runtime.weights.transports.nccl.link_progress import (
    ImageFollower,
    ImageHolder,
    LinkProgress,
)
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.image_memory import numbered
from umbra.runtime.weights.transports.shared_memory.node_images import ImageOrder


class LinkPlan:
    name: TransportName = "tcp"
    connects = True

    def __init__(self, pool: str, images: ImageHolder) -> None:
        self._pool = pool
        self._images = images
        self._sound: dict[str, str] = {}  # by node: contents that none of its engines has refused

    async def find_problem(
        self, offers: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        for rank, offer in enumerate(offers):
            if not offer.link_endpoint:
                return Problem(f"rank {rank} has no address at which other nodes reach it")
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
                num_ranks=len(order.offers),
                num_engines=len(engines),
                contents=contents,
            ),
            engines,
            has_receiver=any(offer.node_id != node_id for offer in order.offers),
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
                (rank, offer.link_endpoint)
                for rank, offer in enumerate(order.offers)
                if offer.node_id != node.node_id
            ]
            receives = {"key": f"{secret}/{idx}", "ranks": ranks, "holds": node.holds}
            details[0] = {**details[0], "receives": receives}
        engine_details |= {engine: details[n] for n, engine in enumerate(node.engines)}

    def rank_details(rank: int) -> Mapping[str, Any]:
        idx = own.get(order.offers[rank].node_id)
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
        progress=LinkProgress(len(order.offers), nodes, gone),
        num_buckets=BucketGrid(order.manifest.nbytes, order.bucket_nbytes).num_buckets,
    )
