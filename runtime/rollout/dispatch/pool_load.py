from __future__ import annotations

import asyncio
import logging
from typing import Final

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT_S: Final = 10.0
"""The supervisor answers from memory."""


class PoolLoad:
    """Reports whether a pool has work: the first state and each change, in order."""

    def __init__(self, supervisor: Handle, pool: str) -> None:
        self._supervisor = supervisor
        self._pool = pool
        self._has_work = False
        self._changed = asyncio.Event()
        self._changed.set()

    def observe(self, has_work: bool) -> None:
        if has_work != self._has_work:
            self._has_work = has_work
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            report = (self._pool, self._has_work)
            try:
                await self._supervisor.call("pool_has_work", *report, timeout_s=_REPORT_TIMEOUT_S)
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow to take a report; repeating it: %s", error)
                self._changed.set()
