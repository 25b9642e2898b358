from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.settings import to_wire
from umbra.runtime.weights.image.image_memory import ImageOrder, NodeImages


class JobImages:
    """The images of weights on all nodes of a job, as an `ImageHolder` for the lead."""

    def __init__(self, own: NodeImages, own_node: str, links: JobLinks) -> None:
        self._own = own
        self._own_node = own_node
        self._links = links

    @asynccontextmanager
    async def hold(
        self, node_id: str, order: ImageOrder
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        if node_id == self._own_node:
            async with aclosing(self._own.hold(order)) as states:
                yield states
            return
        # No deadline per item: while nothing changes there, nothing is reported. Its link notices
        # the loss of the node and drops the connection.
        there = self._links.supervisor_at(node_id)
        arguments = self._links.epoch, to_wire(order)
        async with there.stream("hold_image", *arguments, timeout_s=None) as states:
            yield states
