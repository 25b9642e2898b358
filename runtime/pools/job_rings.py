"""The rings of weights on all nodes of a job, as the supervisor of rank 0's node reaches them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.settings import to_wire
from umbra.runtime.weights.transports.shared_memory.node_rings import NodeRings, RingOrder

_CALL_LIMIT_S: Final = 10.0


class JobRings:
    """Implements `umbra.runtime.weights.transports.nccl.link_progress.RingHolder`.

    Args:
        own: of this node, `own_node`.
        links: to the other nodes.
    """

    def __init__(self, own: NodeRings, own_node: str, links: JobLinks) -> None:
        self._own = own
        self._own_node = own_node
        self._links = links

    @asynccontextmanager
    async def hold(
        self, node_id: str, order: RingOrder
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        if node_id == self._own_node:
            async with aclosing(self._own.hold(order)) as states:
                yield states
            return
        # No deadline per item: a ring that does not change reports nothing. A node that is lost is
        # noticed by its link, and its connection dropped.
        there = self._links.supervisor_at(node_id)
        arguments = self._links.epoch, to_wire(order)
        async with there.stream("hold_ring", *arguments, timeout_s=None) as states:
            yield states

    async def dismiss(self, node_id: str, key: str, engine: int) -> None:
        if node_id == self._own_node:
            self._own.dismiss(key, engine)
        else:
            there = self._links.supervisor_at(node_id)
            arguments = self._links.epoch, key, engine
            await there.call("dismiss_from_ring", *arguments, timeout_s=_CALL_LIMIT_S)
