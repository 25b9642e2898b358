"""Requests to the job that runs in a run directory: by a call, or left there as a file."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

from umbra.runtime.cluster.run_notice import JobRequest, RunNotice, SupervisorAddress
from umbra.runtime.errors import ActorNotFound

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 1.0
"""Interval of looks for a request. A longer one delays the stop; each asks the file system."""


class JobRequests:
    """Owned by the supervisor of rank 0's node.

    Args:
        act_on: called with each request to this job. It raises ActorNotFound if it cannot.
    """

    def __init__(
        self, run_dir: Path, node_id: str, socket_dir: Path, act_on: Callable[[JobRequest], None]
    ) -> None:
        self._notice = RunNotice(run_dir)
        self._address = SupervisorAddress(
            job=secrets.token_hex(8), node_id=node_id, pid=os.getpid(), socket_dir=str(socket_dir)
        )
        self._act_on = act_on

    def posted(self, tcp_endpoint: str, secret_file: str) -> AbstractContextManager[None]:
        """See `RunNotice.posted` and `SupervisorAddress`."""
        address = replace(self._address, tcp_endpoint=tcp_endpoint, secret_file=secret_file)
        return self._notice.posted(address)

    def mark_preempted(self) -> None:
        """Tells the launcher to start the job again."""
        self._notice.mark_preempted()

    def take(self, request: JobRequest) -> None:
        """Raises ActorNotFound if it is addressed to another job, or cannot be fulfilled."""
        job = self._address.job
        if request.job != job:
            raise ActorNotFound(f"job {request.job} has ended; {job} is running")
        self._act_on(request)

    async def look(self) -> None:
        """Takes the requests of those who cannot reach the supervisor's socket, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                # The file system may be shared, and answer late.
                request = await asyncio.to_thread(self._notice.take_request)
            except OSError as error:
                logger.warning("cannot look for a request: %s", error)
                continue
            if request is not None and request.job == self._address.job:
                try:
                    self._act_on(request)
                except ActorNotFound as error:
                    logger.warning("a request was left that cannot be fulfilled: %s", error)
