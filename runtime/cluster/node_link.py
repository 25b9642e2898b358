"""The links between the lead's supervisor and those of the other nodes.

    member ── join ────▶ lead     a stream: events elsewhere come back, and heartbeats
    member ── report ──▶ lead     events of the member's node, and heartbeats

Both send something at least every `HEARTBEAT_S`. An end that is silent for `LOST_AFTER_S` is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Final

from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.errors import (
    ActorNotFound,
    DeadlineExceeded,
    UmbraError,
)
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 4.0
LOST_AFTER_S: Final = 2 * HEARTBEAT_S
# A network that fails for 3 s costs nothing: tcp sends again after 0.2, 0.6, 1.4, 3 and 6.2 s. With
# a longer limit, ranks stay longer in collectives with a node that is gone.
FAREWELL_LIMIT_S: Final = 1.0

Event = dict[str, Any]
Specs = Sequence[dict[str, Any]]
"""`ActorSpec`s on the wire."""


class LeadLink:
    """A member's link to the lead. `warm` engines run here for the last epoch's pools. `on_event`
    gets 0, the lead's index, and each event of another node; `on_lost` 0 and the reason, once."""

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
        self._reports.put_nowait(event)

    async def wait_joined(self, timeout_s: float) -> None:
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
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(self._follow()), tasks.create_task(self._send())]
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                part.cancel()
        if why := "; ".join(part.result() for part in done):
            self._on_lost(0, why)

    async def leave(self) -> None:
        """Sends the remaining reports, and that this node's end is no failure, maybe to no one."""
        self.report({"kind": "left"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_LIMIT_S):
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
    def __init__(self, node: JobNode) -> None:
        self.node = node
        self.has_joined = asyncio.Event()
        self.has_left = asyncio.Event()
        self.warm: Specs = ()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.heard = asyncio.Event()


class MemberLinks:
    """The lead's links to all other supervisors (see `node_link`); the first of `nodes` is the
    lead's own. The callbacks get a node's index: `on_event` for each event, then `on_lost` or
    `on_left` once."""

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
        """A node that only generates stops taking part; others take part until the job ends."""
        if self._members[idx].node.num_ranks == 0:
            del self._members[idx]

    def _member(self, idx: int) -> _Member:
        if idx not in self._members:
            raise ActorNotFound(f"node {idx} no longer takes part in the job")
        return self._members[idx]

    def __contains__(self, idx: int) -> bool:
        return idx in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def tell(self, idx: int, event: Event) -> None:
        if idx in self._members:
            self._members[idx].events.put_nowait(event)

    def broadcast(self, event: Event) -> None:
        for member in self._members.values():
            member.events.put_nowait(event)

    async def leave(self) -> None:
        """Announces that the lead's end is no failure. Members may be gone already."""
        self.broadcast({"kind": "left"})
        members = list(self._members.values())  # they leave meanwhile
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_LIMIT_S):
                for member in members:
                    if not member.has_left.is_set():
                        await member.events.join()

    def warm(self) -> dict[int, Specs]:
        return {idx: member.warm for idx, member in self._members.items() if member.warm}

    async def join(self, idx: int, warm: Specs) -> AsyncGenerator[Event, None]:
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
        member = self._member(idx)
        member.heard.set()
        if event["kind"] == "left":
            member.has_left.set()
        elif event["kind"] != "beat":
            self._on_event(idx, event)
