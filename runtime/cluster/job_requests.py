from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from umbra.runtime.cluster.run_notice import JobAnswer, JobRequest, RunNotice, SupervisorAddress
from umbra.runtime.errors import ActorNotFound

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 1.0
"""Interval of looks for a request. A longer one delays the stop; each asks the file system."""


class JobRequests:
    """Requests to the job in a run directory, by a call or a file. Owned by a
    supervisor with ranks.

    The lead makes itself known in the directory, and looks there. The directory may be on a shared
    file system that answers late, so threads use it; writes come one after the other. `act_on` is
    called with each request to this job, and raises ActorNotFound if it cannot.
    """

    def __init__(self, run_dir: Path, act_on: Callable[[JobRequest], None]) -> None:
        self.is_lead = False
        self._notice = RunNotice(run_dir)
        self._address: SupervisorAddress | None = None  # the last one posted
        self._act_on = act_on
        self._order = asyncio.Lock()

    async def post(self, address: SupervisorAddress) -> None:
        """Makes this supervisor known as the lead. A request to the same job stays."""
        self.is_lead = True
        async with self._order:
            self._address = address
            await asyncio.to_thread(self._notice.post, address)

    async def mark_preempted(self) -> None:
        async with self._order:
            await asyncio.to_thread(self._notice.mark_preempted)

    async def withdraw(self) -> None:
        """Called when the job is over here. The address stays if another node has posted one."""
        async with self._order:
            if self._address is not None:
                await asyncio.to_thread(self._notice.withdraw, self._address)

    async def look(self) -> None:
        """Takes requests from clients that cannot reach the supervisor's socket, until cancelled.
        Must not be cancelled before the job is over: a request just taken would be lost."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if not self.is_lead:
                continue
            try:
                request = await asyncio.to_thread(self._notice.take_request)
                if request is not None:
                    answer = JobAnswer(token=request.token, refusal=self._try(request))
                    await asyncio.to_thread(self._notice.answer, answer)
            except OSError as error:
                logger.warning("cannot take a request from the run directory: %s", error)

    def _try(self, request: JobRequest) -> str:
        try:
            self._act_on(request)
        except ActorNotFound as error:
            return str(error)
        return ""
