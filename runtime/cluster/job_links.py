from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from umbra.runtime.cluster.job_nodes import JobNode, check_nodes, ranks_of, request_name
from umbra.runtime.cluster.node_link import LOST_AFTER_S, Event, LeadLink, MemberLinks, Specs
from umbra.runtime.errors import (
    ActorNotFound,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    JobFailed,
    RemoteError,
    UmbraError,
)
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.settings import to_wire


class NodeEvents(Protocol):
    def on_node_event(self, node: int, event: Event) -> None: ...

    def on_node_lost(self, node: int, why: str) -> None: ...

    def on_node_left(self, node: int) -> None: ...


class JobLinks:
    """The links between the supervisors of a job: a star around the lead, which is rank 0's.

    If a node is lost, so is the job, unless the node only generates. Such a node comes and goes
    while the job runs: the lead admits it before it joins. If torchrun restarts the ranks, maybe on
    other nodes, the links of the last epoch end and the supervisors link again, maybe around
    another lead. A job that listens on no address has no links.

    Attributes:
        job: a random name, the same on all nodes that have met; see `SupervisorAddress`.
        tcp_endpoint: where other nodes reach this one; "" for nowhere.
        epoch: the last one that this node took part in; 0 for none.
        nodes: of this epoch, past ones too: nodes with ranks by rank, then nodes that only
            generate. Empty before `begin`; only the lead on a node that only generates.
        lead: the supervisor of rank 0's node; None on that node itself.
    """

    def __init__(self, client: Client) -> None:
        self.job = secrets.token_hex(8)
        self.tcp_endpoint = ""
        self.epoch = 0
        self._client = client
        self._has_begun = asyncio.Event()
        self._has_ranks = True
        self._task: asyncio.Task[None] | None = None
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self.has_met = False
        self._node = 0
        self.nodes: list[JobNode] = []
        self.lead: Handle | None = None
        self.ended = asyncio.Event()
        self._to_lead: LeadLink | None = None
        self._to_members: MemberLinks | None = None
        self._has_begun.clear()

    def begin(
        self,
        nodes: Sequence[JobNode],
        node: int,
        epoch: int,
        events: NodeEvents,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Begins an epoch, which must reach the lead within `LOST_AFTER_S` of a member's join."""
        self.nodes, self.epoch, self._node = list(nodes), epoch, node
        self.job = request_name(nodes)
        self._events = events
        if node > 0:
            self.lead = self._client.handle(nodes[0].supervisor, awaits_start=True)
        else:
            self._to_members = MemberLinks(nodes, events.on_node_event, self._lose, self._part)
            self._task = tasks.create_task(self._to_members.run(), name="members")
        self._has_begun.set()

    async def connect(
        self, epoch: int, warm: Specs, timeout_s: float, tasks: asyncio.TaskGroup
    ) -> bool:
        """Links this node to the lead, or the lead to all; False if the ranks were restarted
        before. `warm` are engines that run here for the last epoch's pools."""
        if self._is_in(epoch):
            if self._to_members is not None:
                await self._to_members.wait_joined(timeout_s)
            elif self.lead is not None:
                await self._join(self.lead, self._node, warm, timeout_s, tasks)
        self.has_met = self.has_met or self._is_in(epoch)
        return self._is_in(epoch)

    def _is_in(self, epoch: int) -> bool:
        return self._has_begun.is_set() and epoch == self.epoch

    async def generate_for(
        self,
        lead: JobNode,
        me: JobNode,
        timeout_s: float,
        events: NodeEvents,
        tasks: asyncio.TaskGroup,
    ) -> int:
        """Joins a running job as a node that only generates; returns its index there. Raises
        ConfigError if the lead refuses this node, JobFailed if it cannot be reached."""
        self.nodes, self._events = [lead], events
        self._has_ranks = False
        self.lead = self._client.handle(lead.supervisor)
        try:
            admitted = await self.lead.call("admit", to_wire(me), timeout_s=timeout_s)
            node, self.epoch = int(admitted["node"]), int(admitted["epoch"])
            self._has_begun.set()
            await self._join(self.lead, node, (), timeout_s, tasks)
        except RemoteError as error:
            raise ConfigError(error.remote_message) from None
        except (ConnectionLost, DeadlineExceeded) as error:
            raise JobFailed(
                f"the supervisor at {lead.tcp_endpoint} did not admit this machine: does the file "
                f"of keys here belong to the job that runs there? ({error})"
            ) from error
        return node

    async def _join(
        self,
        lead: Handle,
        node: int,
        warm: Specs,
        timeout_s: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        on_event = self._events.on_node_event
        link = self._to_lead = LeadLink(lead, node, self.epoch, warm, on_event, self._lose)
        self._task = tasks.create_task(_follow(link, self.ended), name="lead")
        await link.wait_joined(timeout_s)

    async def admit(self, node: JobNode) -> int:
        """Takes in a node that only generates; returns its index, or raises ConfigError."""
        members = await self._members()
        # A node that is gone may come back with its id.
        check_nodes([*(self.nodes[idx] for idx in (0, *members)), node])
        self.nodes.append(node)
        idx = len(self.nodes) - 1
        members.admit(idx, node)
        return idx

    def name_of_this_node(self) -> str:
        """ "" if it is the only one, or generates for a job."""
        is_named = self._has_ranks and len(self.nodes) > 1
        return self.name_of(self._node) if is_named else ""

    def node_of_rank(self, rank: int) -> str:
        """The name of the rank's node; "" if there is only one."""
        several = range(len(self.nodes)) if len(self.nodes) > 1 else ()
        return next((self.name_of(n) for n in several if rank in ranks_of(self.nodes, n)), "")

    def name_of(self, node: int) -> str:
        return f"node {node} ({self.nodes[node].node_id})"

    def only_generates(self, node: int) -> bool:
        """Lead only."""
        return self.nodes[node].num_ranks == 0

    def dismiss(self, node: int, why: str) -> None:
        """Asks a node that only generates to leave. `why` is its failure, or ""."""
        assert self._to_members is not None
        self._to_members.tell(node, {"kind": "dismissed", "why": why})

    def find_generator(self, name: str) -> int:
        """The index of a node that takes part and only generates, by its index or id."""
        members = self._to_members
        known = {
            idx: node.node_id
            for idx, node in enumerate(self.nodes)
            if node.num_ranks == 0 and members is not None and idx in members
        }
        for idx, node_id in known.items():
            if name in (str(idx), node_id):
                return idx
        there_are = ", ".join(f"{idx} ({node_id})" for idx, node_id in known.items()) or "none"
        raise ActorNotFound(f"no node {name!r} that only generates; there are: {there_are}")

    def supervisor_of(self, node: int) -> Handle:
        if node >= len(self.nodes):
            raise ConfigError(f"there is no node {node}; the job has {max(1, len(self.nodes))}")
        return self._client.handle(self.nodes[node].supervisor)

    def supervisors_elsewhere(self) -> dict[str, Handle]:
        """Supervisors of the other active nodes, by node name. Lead only."""
        return {
            f"node-{idx}": self.supervisor_of(idx)
            for idx in range(1, len(self.nodes))
            if self._to_members is not None and idx in self._to_members
        }

    async def ask_elsewhere(self, method: str, timeout_s: float) -> dict[str, Any]:
        """Each other supervisor's answer or UmbraError, by node name. Lead only."""

        async def ask(there: Handle) -> Any:
            try:
                return await there.call(method, timeout_s=timeout_s)
            except UmbraError as error:
                return error

        others = self.supervisors_elsewhere()
        answers = await asyncio.gather(*map(ask, others.values()))
        return dict(zip(others, answers, strict=True))

    def supervisor_at(self, node_id: str) -> Handle:
        for node in reversed(self.nodes):  # a later one may have the id of one that is gone
            if node.node_id == node_id:
                return self._client.handle(node.supervisor)
        raise ActorNotFound(f"there is no node {node_id!r} in the job")

    def has_left(self, node: int) -> bool:
        """Whether a node has announced that its end is no failure. Lead only."""
        return self._to_members is not None and self._to_members.has_left(node)

    def tell(self, event: Event) -> None:
        """Sends an event to the lead, or the lead's to all. Nodes that only generate send none."""
        if self._to_lead is not None and self._has_ranks:
            self._to_lead.report(event)
        if self._to_members is not None:
            self._to_members.broadcast(event)

    def tell_lead(self, event: Event) -> None:
        if self._to_lead is not None:
            self._to_lead.report(event)

    async def leave(self) -> None:
        """Announces that this node's end is no failure, and closes the links."""
        if self._to_lead is not None:
            await self._to_lead.leave()
        if self._to_members is not None:
            await self._to_members.leave()
        if self._task is not None:
            self._task.cancel()

    def warm_elsewhere(self) -> dict[int, Specs]:
        return {} if self._to_members is None else self._to_members.warm()

    def start_over(self) -> None:
        """Ends the links without a farewell before the nodes meet again. Nodes that only
        generate leave."""
        if self._to_members is not None:
            for idx, node in enumerate(self.nodes):
                if node.num_ranks == 0:
                    self.dismiss(idx, "")
        if self._task is not None:
            self._task.cancel()
        self._forget_nodes()

    async def join(self, epoch: int, node: int, warm: Specs) -> AsyncGenerator[Event, None]:
        members = await self._members_in(epoch)
        async for event in members.join(node, warm):
            yield event

    async def report(self, epoch: int, node: int, event: Event) -> None:
        members = await self._members_in(epoch)
        members.report(node, event)

    async def check_epoch(self, epoch: int) -> None:
        """Raises ActorNotFound for a supervisor's call from another epoch. Must come first in such
        calls. Waits, because the caller may know an epoch before this node."""
        await self._await_begin()
        if epoch != self.epoch:
            raise ActorNotFound(f"the nodes have met again: epoch {epoch} is not {self.epoch}")

    async def _await_begin(self) -> None:
        async with asyncio.timeout(LOST_AFTER_S):
            await self._has_begun.wait()

    async def _members(self) -> MemberLinks:
        await self._await_begin()
        if self._to_members is None:
            raise ActorNotFound("another node is rank 0's")
        return self._to_members

    async def _members_in(self, epoch: int) -> MemberLinks:
        await self.check_epoch(epoch)
        return await self._members()

    def _lose(self, node: int, why: str) -> None:
        self._client.drop(self.nodes[node].supervisor, why)
        self._events.on_node_lost(node, why)

    def _part(self, node: int) -> None:
        self._client.drop(self.nodes[node].supervisor, "it has left the job")
        self._events.on_node_left(node)


async def _follow(link: LeadLink, ended: asyncio.Event) -> None:
    try:
        await link.run()
    finally:
        ended.set()
