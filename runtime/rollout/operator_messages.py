"""Sends lines to the operator, the person who runs the job, through the supervisor."""

from __future__ import annotations

import asyncio
import logging

from umbra.runtime.errors import UmbraError
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)


class OperatorMessages:
    """Accepts lines at any time; `run()` sends them to the supervisor."""

    def __init__(self, supervisor: Handle) -> None:
        self._supervisor = supervisor
        # One line per lost engine, so the restart policy bounds the queue.
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def put(self, text: str) -> None:
        logger.info("%s", text)
        self._lines.put_nowait(text)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            text = await self._lines.get()
            try:
                await self._supervisor.call("note", text, timeout_s=5.0)
            except UmbraError as error:
                logger.warning("the supervisor did not accept an operator message: %s", error)
