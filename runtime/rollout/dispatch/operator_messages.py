from __future__ import annotations

import asyncio
import logging

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.errors import UmbraError

logger = logging.getLogger(__name__)


class OperatorMessages:
    """Accepts lines for the operator at any time; `run()` sends them to the supervisor."""

    def __init__(self, context: ActorContext) -> None:
        self._supervisor = context.supervisor
        self._name = context.name
        # One line per lost engine, so the restart policy bounds the queue.
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def put(self, text: str) -> None:
        logger.info("%s", text)
        self._lines.put_nowait(text)

    async def run(self) -> None:
        while True:
            await self._send("note", await self._lines.get(), "note")

    async def record(self, text: str, kind: EventKind) -> None:
        """Writes an event to events.jsonl only; returns once the supervisor has it."""
        await self._send("record", text, kind)

    async def _send(self, method: str, text: str, kind: EventKind) -> None:
        try:
            await self._supervisor.call(method, text, kind, self._name, timeout_s=5.0)
        except UmbraError as error:
            logger.warning("the supervisor did not accept an operator message: %s", error)
