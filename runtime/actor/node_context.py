"""The objects that the parts of a node's supervisor share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from umbra.runtime.actor.job_rules import JobRules
from umbra.runtime.actor.job_stop import JobStop
from umbra.runtime.actor.remote_actor import RemoteActor
from umbra.runtime.actor.supervised_actor import NodeSettings, SupervisedActor
from umbra.runtime.cluster.attached_ranks import AttachedRanks
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.run_events import Notify
from umbra.runtime.rpc.rpc_client import Client


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


class ActorWatcher(Protocol):
    """The supervisor, as its actors see it."""

    def on_actor_change(self, actor: SupervisedActor) -> None: ...

    def on_remote_change(self, node: int, actor: RemoteActor) -> None: ...

    async def explain_late(self, why: str) -> str:
        """Text for the error of an actor whose first start is late, before it is killed."""
        ...
