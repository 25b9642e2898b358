"""The objects that the parts of a node's supervisor share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from umbra.runtime.actor.job_rules import STOP_WINDOW_S, JobRules
from umbra.runtime.cluster.attached_ranks import AttachedRanks
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.run_events import Notify
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.waiting import first_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings that every actor of a node is started with. `keys` are a public and a secret CURVE
    key, or () in a job without tcp."""

    node_id: str
    socket_dir: Path
    log_dir: Path
    supervisor: ActorRef
    tcp_host: str
    keys: Sequence[bytes]
    log_level: int
    trace_dir: str = ""


class JobStop:
    """Whether the whole job is being stopped, and not a single actor. Owned by the supervisor.

    `scancel`, the end of a container and `kill` on a process group send their signal to every
    process of a job. Then the ranks decide when to end: they stop at a step boundary, with a
    checkpoint, for which they need the actors. The same signal to one actor alone is that actor's
    failure.

        actor gets SIGTERM ──▶ it keeps serving, and reports the signal to its supervisor
            ├─ a rank, supervisor or guardian gets one within STOP_WINDOW_S ──▶ the job stops
            └─ none of them does ──▶ the actor is ended, and replaced under its restart policy
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._absent = asyncio.Event()
        self._absent.set()

    def request(self) -> None:
        """A stop signal reached a rank, the supervisor or the guardian."""
        self._requested.set()
        self._absent.clear()

    def withdraw(self) -> None:
        """torchrun has started the ranks again: the job continues."""
        self._requested.clear()
        self._absent.set()

    async def settle(self, own_stop: asyncio.Event) -> None:
        """After a signal to an actor: returns once it is known whether the job is being stopped.
        `own_stop` is set when umbra asks the actor to end, as it does at the end of each stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WINDOW_S):
                await first_of(self._requested, own_stop)

    async def outlast(self, own_stop: asyncio.Event) -> None:
        """Returns when the job is not being stopped, or `own_stop` is set."""
        await first_of(self._absent, own_stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """Made and owned by the supervisor; its parts hold it as long as they live."""

    node: NodeSettings
    client: Client
    rules: JobRules
    links: JobLinks
    ranks: AttachedRanks
    note: Notify  # shows a line to the operator, and records it
    record: Notify
    job_stop: JobStop = field(default_factory=JobStop)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)  # until the job is over
    # of the actors' mailboxes
    sockets: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context[zmq.Socket[bytes]])
