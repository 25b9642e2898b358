"""Asks the supervisor of a running job, for commands that get its run directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.cluster.run_requests import RunNotice, SupervisorAddress
from umbra.runtime.cluster.socket_dir import is_in_use
from umbra.runtime.errors import ActorNotFound, ConnectionLost, MailboxClosed
from umbra.runtime.reports.job_state import JobState
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import from_wire
from umbra.runtime.supervisor.supervisor_main import supervisor_ref

T = TypeVar("T")

_ANSWER_LIMIT_S: Final = 5.0
"""Deadline of the whole state. Processes that do not answer take a second of it."""


async def job_state(run_dir: Path) -> JobState | None:
    """The state of a run directory's job; None if none runs there, or it runs on another host or in
    another container. Raises DeadlineExceeded if its supervisor does not answer."""
    address = RunNotice(run_dir).address()
    try:
        if address is None or not is_reachable(address):
            return None
        return from_wire(JobState, await ask_supervisor(address, "job_state"))
    except (ActorNotFound, ConnectionLost, MailboxClosed):  # it has ended, or was killed
        return None


def run_interruptibly(call: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but Ctrl-C raises KeyboardInterrupt wherever the call is. asyncio.run
    cancels the call instead, and forgets the signal if the call returns without waiting."""
    with asyncio.Runner() as runner:
        return runner.get_loop().run_until_complete(call)


def is_reachable(address: SupervisorAddress) -> bool:
    """Whether its socket can be used from here. Raises ActorNotFound if it was killed."""
    socket_dir = Path(address.socket_dir)
    if not os.access(socket_dir, os.R_OK | os.W_OK):  # elsewhere, or another user's
        return False
    if not is_in_use(socket_dir):
        raise ActorNotFound(f"the job was killed: its socket folder {socket_dir} is abandoned")
    return True


async def ask_supervisor(
    address: SupervisorAddress, method: str, *args: object, timeout_s: float = _ANSWER_LIMIT_S
) -> Any:
    ref = supervisor_ref(address.node_id, Path(address.socket_dir))
    async with Client(address.node_id) as client:
        return await client.handle(ref).call(method, *args, timeout_s=timeout_s)
