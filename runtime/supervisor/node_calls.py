from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.cluster.job_links import NodeEvents
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.run_requests import JobRequest
from umbra.runtime.errors import JobFailed
from umbra.runtime.pools.job_pools import JobPools
from umbra.runtime.settings import from_wire
from umbra.runtime.waiting import first_of


class JobEvents(NodeEvents, Protocol):
    """The supervisor, as it learns of other nodes and of requests."""

    async def set_lead(self, is_lead: bool) -> None: ...

    def take_request(self, request: JobRequest) -> None: ...

    def act_on_waiting(self) -> None: ...


class NodeCalls:
    """The supervisor's calls that link it to those of other nodes, and requests to the job."""

    def __init__(self, supervisor: JobEvents, context: NodeContext, pools: JobPools) -> None:
        self._supervisor = supervisor
        self._context = context
        self._rules = context.rules
        self._ranks = context.ranks
        self._links = context.links
        self._pools = pools

    async def join_job(
        self, nodes: list[dict[str, Any]], node: int, epoch: int, timeout_s: float
    ) -> None:
        """Called by local rank 0: links the supervisors of all nodes (`JobNode`s, by rank). Engines
        of the last epoch are at rest on all nodes before rank 0 learns that the nodes have met: a
        member joins the lead when its own are. Raises DeadlineExceeded if a supervisor is missing.
        """
        parsed = [from_wire(JobNode, raw) for raw in nodes]
        self._rules.begin_epoch()
        self._links.begin(parsed, node, epoch, self._supervisor, self._context.tasks)
        if self._rules.has_epochs:
            await self._supervisor.set_lead(node == 0)
        warm = await self._pools.keep_warm()
        if await self._links.connect(epoch, warm, timeout_s, self._context.tasks):
            self._ranks.tell_nodes(nodes, epoch)
            self._supervisor.act_on_waiting()

    async def join(
        self, epoch: int, node: int, warm: list[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        async for event in self._links.join(epoch, node, warm):
            yield event

    async def report(self, epoch: int, node: int, event: dict[str, Any]) -> None:
        await self._links.report(epoch, node, event)

    async def generate(
        self, lead: dict[str, Any], me: dict[str, Any], timeout_s: float
    ) -> AsyncGenerator[str, None]:
        """Called by `umbra.runtime.node`: this node, which has no ranks, generates for a running
        job until that is over. It leaves, and this supervisor ends, when the stream is closed.

        `lead` and `me` are rank 0's node and this one, each a `JobNode`. Yields lines for the
        person who started the program. Raises ConfigError if the job cannot use this node,
        JobFailed if the job or this node's engines have failed, or it cannot be reached.
        """
        over, tasks = self._context.over, self._context.tasks
        try:
            nodes = from_wire(JobNode, lead), from_wire(JobNode, me)
            node = await self._links.generate_for(*nodes, timeout_s, self._supervisor, tasks)
            yield f"joined as node {node}"
            await first_of(self._links.ended, self._ranks.failed, over)
            if failure := self._ranks.failure:
                text, about = f"node {node}: {failure}", ("fault", self._context.node.node_id)
                note = {"kind": "note", "text": text, "about": about}
                self._links.tell_lead(note)
                raise JobFailed(failure)
            yield "the job is over" if self._links.ended.is_set() else "left the job, as asked"
        finally:
            over.set()

    def request(self, call: dict[str, Any]) -> None:
        """Called for `umbra stop`, `preempt`, `drain` and `dump`, with a `JobRequest`. Raises
        ActorNotFound if it is addressed to another job, or that has no such node."""
        self._supervisor.take_request(from_wire(JobRequest, call))
