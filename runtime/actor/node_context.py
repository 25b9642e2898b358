"""The objects that the parts of a node's supervisor share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from umbra.runtime.actor.job_rules import JobRules
from umbra.runtime.actor.job_stop import JobStop
from umbra.runtime.cluster.attached_ranks import AttachedRanks
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.run_events import Notify
from umbra.runtime.rpc.envelopes import ActorRef
from umbra.runtime.rpc.rpc_client import Client


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
