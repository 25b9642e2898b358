"""The link of a node's supervisor to the lead's, and constants of both ends.

    member ── join ────▶ lead     a stream: events elsewhere come back, and heartbeats
    member ── report ──▶ lead     events of the member's node, and heartbeats

Both send something at least every `HEARTBEAT_S`. An end that is silent for `LOST_AFTER_S` is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from umbra.runtime.errors import DeadlineExceeded, UmbraError
from umbra.runtime.rpc.rpc_client import Handle

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
