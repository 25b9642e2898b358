"""The links between the supervisors of a job: a star around the lead, which is rank 0's.

    member ── join ────▶ lead     a stream: what happens elsewhere comes back, and heartbeats
    member ── report ──▶ lead     what happens on the member's node, and heartbeats

Both send something at least every `HEARTBEAT_S`. Who is silent for `LOST_AFTER_S` is lost, and with
it the job, unless it only generates. Such a node comes and goes while the job runs: the lead admits
it before it joins. `JobLinks` is either end.

If torchrun restarts the ranks, maybe on other nodes, the links of the last epoch are closed and the
supervisors link again, maybe around another lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

from umbra.runtime.cluster.job_nodes import JobNode, check_nodes
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

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 4.0
LOST_AFTER_S: Final = 2 * HEARTBEAT_S
# A network that fails for 3 s costs nothing: tcp sends again after 0.2, 0.6, 1.4, 3 and 6.2 s. With
# a longer limit, ranks stay longer in collectives with a node that is gone.
_FAREWELL_LIMIT_S: Final = 1.0

Event = dict[str, Any]
Specs = Sequence[dict[str, Any]]
"""`ActorSpec`s on the wire."""


class LeadLink:
    """A member's link to the lead.

    Args:
        node: index of this node.
        epoch: see `job_nodes`.
        warm: engines that run here for the pools of the last epoch.
        on_event: called with 0, the lead's index, and each event of another node.
        on_lost: called once with 0 and the reason if the lead is lost.
    """

    def __init__(
        self,
        lead: Handle,
        node: int,
        epoch: int,
        warm: Specs,
        on_event: Callable[[int, Event], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.lead = lead
        self._joined = asyncio.Event()
        self._node = node
        self._epoch = epoch
        self._warm = list(warm)
        self._on_event = on_event
        self._on_lost = on_lost
        self._reports: asyncio.Queue[Event] = asyncio.Queue()

    def report(self, event: Event) -> None:
        """Sends an event of this node to the lead, in order."""
        self._reports.put_nowait(event)

    async def wait_joined(self, timeout_s: float) -> None:
        """Raises DeadlineExceeded if the lead has not answered in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._joined.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"this node's supervisor has not reached that of rank 0's node at "
                f"{self.lead.ref.tcp_endpoint} within {timeout_s:g} s: does a firewall lie between "
                "them?"
            ) from None

    async def run(self) -> None:
        """Returns when the lead has left or is lost."""
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(self._follow()), tasks.create_task(self._send())]
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                part.cancel()
        if why := "; ".join(part.result() for part in done):
            self._on_lost(0, why)

    async def leave(self) -> None:
        """Sends what is left to report, and that this node's end is no failure. The lead may be
        gone already."""
        self.report({"kind": "left"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_LIMIT_S):
                await self._reports.join()

    async def _follow(self) -> str:
        """Returns why the lead is lost, or "" if it has left."""
        try:
            arguments = self._epoch, self._node, self._warm
            async with self.lead.stream("join", *arguments, timeout_s=LOST_AFTER_S) as events:
                async for event in events:
                    self._joined.set()
                    if event["kind"] == "left":
                        return ""
                    if event["kind"] != "beat":
                        self._on_event(0, event)
        except DeadlineExceeded:
            return f"it was silent for {LOST_AFTER_S:g} s"
        except UmbraError as error:
            return str(error)
        return "it ended"

    async def _send(self) -> str:
        """Returns why the lead is lost."""
        while True:
            event: Event | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await self._reports.get()
            try:
                arguments = self._epoch, self._node, event or {"kind": "beat"}
                await self.lead.call("report", *arguments, timeout_s=LOST_AFTER_S)
            except UmbraError as error:
                return str(error)
            if event is not None:
                self._reports.task_done()


class _Member:
    """Another node, as the lead knows it."""

    def __init__(self, node: JobNode) -> None:
        self.node = node
        self.has_joined = asyncio.Event()
        self.has_left = asyncio.Event()
        self.warm: Specs = ()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.heard = asyncio.Event()


class MemberLinks:
    """The lead's links to all members.

    Args:
        nodes: the nodes with ranks; the first is the lead's own.
        on_event: called with the index of a node and an event there.
        on_lost: called once for a node that is lost, with the reason.
        on_left: called once for a node that has left.
    """

    def __init__(
        self,
        nodes: Sequence[JobNode],
        on_event: Callable[[int, Event], None],
        on_lost: Callable[[int, str], None],
        on_left: Callable[[int], None],
    ) -> None:
        self._members = {idx: _Member(node) for idx, node in enumerate(nodes) if idx > 0}
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_left = on_left
        self._watches: asyncio.TaskGroup

    async def wait_joined(self, timeout_s: float) -> None:
        """Raises DeadlineExceeded if a node with ranks has not joined in time."""
        members = list(self._members.values())  # others are admitted meanwhile
        try:
            async with asyncio.timeout(timeout_s):
                for member in members:
                    await member.has_joined.wait()
        except TimeoutError:
            late = [member.node.node_id for member in members if not member.has_joined.is_set()]
            raise DeadlineExceeded(
                f"the supervisors of {', '.join(late)} have not joined this one within "
                f"{timeout_s:g} s: does a firewall lie between them?"
            ) from None

    def has_left(self, idx: int) -> bool:
        return self._members[idx].has_left.is_set()

    async def run(self) -> None:
        """Watches all members until cancelled."""
        async with asyncio.TaskGroup() as self._watches:
            for idx in self._members:
                self._watches.create_task(self._watch(idx))
            await asyncio.get_running_loop().create_future()

    def admit(self, idx: int, node: JobNode) -> None:
        """Takes in a node that only generates. It is lost if it does not join soon."""
        member = self._members[idx] = _Member(node)
        member.has_joined.set()
        self._watches.create_task(self._watch(idx))

    async def _watch(self, idx: int) -> None:
        """Returns when the member has left or is lost."""
        member = self._member(idx)
        await member.has_joined.wait()
        while not member.has_left.is_set():
            member.heard.clear()
            try:
                async with asyncio.timeout(LOST_AFTER_S):
                    await member.heard.wait()
            except TimeoutError:
                self._forget(idx)
                self._on_lost(idx, f"it was silent for {LOST_AFTER_S:g} s")
                return
        self._forget(idx)
        self._on_left(idx)

    def _forget(self, idx: int) -> None:
        """A node that only generates no longer takes part. The others do until the job ends."""
        if self._members[idx].node.num_ranks == 0:
            del self._members[idx]

    def _member(self, idx: int) -> _Member:
        if idx not in self._members:
            raise ActorNotFound(f"node {idx} no longer takes part in the job")
        return self._members[idx]

    def __contains__(self, idx: int) -> bool:
        """Whether the node takes part."""
        return idx in self._members

    def tell(self, idx: int, event: Event) -> None:
        """Sends an event to a member, if it still takes part."""
        if idx in self._members:
            self._members[idx].events.put_nowait(event)

    def broadcast(self, event: Event) -> None:
        """Sends an event to all members."""
        for member in self._members.values():
            member.events.put_nowait(event)

    async def leave(self) -> None:
        """Says that the lead's end is no failure. Members may be gone already."""
        self.broadcast({"kind": "left"})
        members = list(self._members.values())  # they leave meanwhile
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_LIMIT_S):
                for member in members:
                    if not member.has_left.is_set():
                        await member.events.join()

    def warm(self) -> dict[int, Specs]:
        """Engines that the members had when they joined, by node."""
        return {idx: member.warm for idx, member in self._members.items() if member.warm}

    async def join(self, idx: int, warm: Specs) -> AsyncGenerator[Event, None]:
        """The stream of a member's `LeadLink`."""
        member = self._member(idx)
        member.warm = warm
        member.has_joined.set()
        logger.info("node %d (%s) has joined", idx, member.node.node_id)
        yield {"kind": "beat"}
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await member.events.get()
            except TimeoutError:
                yield {"kind": "beat"}
            else:
                yield event
                member.events.task_done()

    def report(self, idx: int, event: Event) -> None:
        """Takes what a member's `LeadLink` sends."""
        member = self._member(idx)
        member.heard.set()
        if event["kind"] == "left":
            member.has_left.set()
        elif event["kind"] != "beat":
            self._on_event(idx, event)


class JobLinks:
    """The links of one supervisor in one epoch, which owns them; there are none in a job that
    listens on no address.

    Attributes:
        epoch: 0 before `connect`.
        nodes: all nodes that the job has had: those with ranks in the order of their ranks, then
            those that only generate. Empty before `connect`. A node that only generates knows the
            lead only.
        lead: the supervisor of rank 0's node; None on that node itself.
        ended: set when the lead has left or is lost.

    Args:
        on_event: called with the index of a node and an event that came from there.
        on_lost: called once for a node that is lost, with the reason.
        on_left: called once for a node that has left, on rank 0's.
    """

    def __init__(
        self,
        client: Client,
        on_event: Callable[[int, Event], None],
        on_lost: Callable[[int, str], None],
        on_left: Callable[[int], None],
    ) -> None:
        self.epoch = 0
        self.nodes: list[JobNode] = []
        self.lead: Handle | None = None
        self.ended = asyncio.Event()
        self._client = client
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_left = on_left
        self._to_lead: LeadLink | None = None
        self._to_members: MemberLinks | None = None
        self._knows_nodes = asyncio.Event()
        self._has_ranks = True
        self._task: asyncio.Task[None] | None = None

    async def connect(
        self,
        nodes: Sequence[JobNode],
        node: int,
        epoch: int,
        warm: Specs,
        timeout_s: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Returns when this node is linked to rank 0's, or rank 0's to all.

        Args:
            node: index of this one.
            warm: engines that run on this node for the pools of the last epoch.

        Raises:
            DeadlineExceeded: another supervisor cannot be reached.
        """
        self.nodes, self.epoch = list(nodes), epoch
        if node == 0:
            members = MemberLinks(nodes, self._on_event, self._lose, self._part)
            self._to_members = members
            self._task = tasks.create_task(members.run(), name="members")
            self._knows_nodes.set()
            await members.wait_joined(timeout_s)
        else:
            self.lead = self._client.handle(nodes[0].supervisor, awaits_start=True)
            await self._join(self.lead, node, warm, timeout_s, tasks)

    async def generate_for(
        self, lead: JobNode, me: JobNode, timeout_s: float, tasks: asyncio.TaskGroup
    ) -> int:
        """Joins a running job as a node that only generates; returns its index there.

        Args:
            lead: rank 0's node.

        Raises:
            ConfigError: the lead refuses this node.
            JobFailed: the lead cannot be reached.
        """
        self.nodes = [lead]
        self._has_ranks = False
        self.lead = self._client.handle(lead.supervisor)
        try:
            admitted = await self.lead.call("admit", to_wire(me), timeout_s=timeout_s)
            node, self.epoch = int(admitted["node"]), int(admitted["epoch"])
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
        link = self._to_lead = LeadLink(lead, node, self.epoch, warm, self._on_event, self._lose)
        self._task = tasks.create_task(self._follow(link), name="lead")
        await link.wait_joined(timeout_s)

    async def _follow(self, link: LeadLink) -> None:
        try:
            await link.run()
        finally:
            self.ended.set()

    async def admit(self, node: JobNode) -> int:
        """Takes in a node that only generates; returns its index.

        Raises:
            ConfigError: it cannot be a node of this job.
        """
        members = await self._members()
        check_nodes([*self.nodes, node])
        self.nodes.append(node)
        idx = len(self.nodes) - 1
        members.admit(idx, node)
        return idx

    def only_generates(self, node: int) -> bool:
        """Asked on rank 0's node."""
        return self.nodes[node].num_ranks == 0

    def dismiss(self, node: int, why: str) -> None:
        """Asks a node that only generates to leave, if it still takes part.

        Args:
            why: what has failed there; "" if nothing has.
        """
        assert self._to_members is not None
        self._to_members.tell(node, {"kind": "dismissed", "why": why})

    def find_generator(self, name: str) -> int:
        """The index of a node that takes part and only generates.

        Args:
            name: its index or its id.

        Raises:
            ActorNotFound: there is none of that name.
        """
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
        """Raises ConfigError if the job has no such node."""
        if node >= len(self.nodes):
            raise ConfigError(f"there is no node {node}; the job has {max(1, len(self.nodes))}")
        return self._client.handle(self.nodes[node].supervisor)

    def supervisor_at(self, node_id: str) -> Handle:
        """Raises ActorNotFound if no node has this id."""
        for node in self.nodes:
            if node.node_id == node_id:
                return self._client.handle(node.supervisor)
        raise ActorNotFound(f"there is no node {node_id!r} in the job")

    def has_left(self, node: int) -> bool:
        """Whether another node has said that its end is no failure; asked on rank 0's node."""
        return self._to_members is not None and self._to_members.has_left(node)

    def tell(self, event: Event) -> None:
        """Sends an event of this node to the lead, or of the lead to all others. What ends a node
        that only generates does not concern the others."""
        if self._to_lead is not None and self._has_ranks:
            self._to_lead.report(event)
        if self._to_members is not None:
            self._to_members.broadcast(event)

    def tell_lead(self, event: Event) -> None:
        """Sends an event of this node to the lead, if that is another one."""
        if self._to_lead is not None:
            self._to_lead.report(event)

    async def leave(self) -> None:
        """Says that this node's end is no failure, and closes the links."""
        if self._to_lead is not None:
            await self._to_lead.leave()
        if self._to_members is not None:
            await self._to_members.leave()
        if self._task is not None:
            self._task.cancel()

    def warm_elsewhere(self) -> dict[int, Specs]:
        """See `MemberLinks.warm`."""
        return {} if self._to_members is None else self._to_members.warm()

    def end_warm(self, node: int, names: Sequence[str]) -> None:
        """Asks a member to end engines of the last epoch, which no pool uses."""
        assert self._to_members is not None
        self._to_members.tell(node, {"kind": "end_warm", "names": list(names)})

    def close(self) -> None:
        """Ends the links without a farewell, because the nodes meet again. Nodes that only
        generate leave."""
        if self._to_members is not None:
            for idx, node in enumerate(self.nodes):
                if node.num_ranks == 0:
                    self.dismiss(idx, "")
        if self._task is not None:
            self._task.cancel()

    async def join(self, epoch: int, node: int, warm: Specs) -> AsyncGenerator[Event, None]:
        """See `MemberLinks.join`."""
        members = await self._members_in(epoch)
        async for event in members.join(node, warm):
            yield event

    async def report(self, epoch: int, node: int, event: Event) -> None:
        """See `MemberLinks.report`."""
        members = await self._members_in(epoch)
        members.report(node, event)

    async def _members(self) -> MemberLinks:
        """Another node may know all nodes before this one does."""
        async with asyncio.timeout(LOST_AFTER_S):
            await self._knows_nodes.wait()
        assert self._to_members is not None
        return self._to_members

    async def _members_in(self, epoch: int) -> MemberLinks:
        """Raises ActorNotFound if the caller is in another epoch."""
        members = await self._members()
        if epoch != self.epoch:
            raise ActorNotFound(f"the nodes have met again: epoch {epoch} is not {self.epoch}")
        return members

    def _lose(self, node: int, why: str) -> None:
        self._client.drop(self.nodes[node].supervisor, why)
        self._on_lost(node, why)

    def _part(self, node: int) -> None:
        self._client.drop(self.nodes[node].supervisor, "it has left the job")
        self._on_left(node)
