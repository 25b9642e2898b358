"""Tells the supervisor whether a pool has requests to answer: by it pools share memory in turn."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

_TELL_TIMEOUT_S: Final = 10.0
"""The supervisor answers from memory."""


class PoolLoad:
    """Takes changes at any time; `run()` tells of them, in order, and of how it is at first."""

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
        """Lives until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            told = (self._pool, self._has_work)
            try:
                await self._supervisor.call("pool_has_work", *told, timeout_s=_TELL_TIMEOUT_S)
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow; telling it again: %s", error)
                self._changed.set()
