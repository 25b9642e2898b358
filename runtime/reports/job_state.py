"""The present state of a job, in plain data: one answer of the supervisor, and how the
commands that get a run directory ask for it.

    JobState ─┬─ nodes: NodeStatus ─┬─ ranks: RankStatus
              │                     └─ actors: ActorStatus
              ├─ pools: PoolStatus ─── engines: EngineStatus
              └─ rollouts: RolloutStatus

All of it was read at `JobState.time`. An age says how long something has been as it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.cluster.run_requests import RunNotice, SupervisorAddress, supervisor_ref
from umbra.runtime.cluster.socket_dir import is_in_use
from umbra.runtime.errors import ActorNotFound, ConnectionLost, MailboxClosed
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import from_wire
from umbra.runtime.terminal_text import format_duration

T = TypeVar("T")

_ANSWER_LIMIT_S: Final = 5.0
"""Deadline of the whole state. Processes that do not answer take a second of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    rank: int
    pid: int
    is_stopped: bool = False  # whether a signal has stopped it (SIGSTOP)
    waits_for: str = ""  # its call; "" while it computes, or is in a collective of its own
    waits_s: float = 0.0  # age of that call


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """A process that a supervisor keeps running."""

    name: str
    role: str  # "engine", "manager", "rollout" (a worker) or "actor"
    state: str  # "STARTING", "RUNNING", "STOPPED" or "FAILED"
    pid: int  # of its last process
    incarnation: int
    num_restarts: int
    is_stopped: bool = False  # whether a signal has stopped that process (SIGSTOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node. `name` "node-0" is rank 0's; `problem` says why its state is unknown, else ""."""

    name: str
    node_id: str = ""
    ranks: tuple[RankStatus, ...] = ()
    actors: tuple[ActorStatus, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    name: str
    node_id: str  # its node; "" while it has no process that answers
    pid: int  # of its last process
    state: str  # DEAD once its process has ended, STARTING with the next
    state_age_s: float  # time since it entered that state, or since its last process ended
    incarnation: int
    version: int | None  # of the weights that it holds for certain
    num_restarts: int
    gpus: tuple[str, ...]  # by index or UUID; empty on the CPU, or if it may use any
    running: int | None  # requests in generation; None without an answer
    waiting: int | None  # requests in its queue; None without an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    name: str
    mode: str
    version: int | None  # the last one that was published to it; None before the first
    engines: tuple[EngineStatus, ...]
    sync_version: int | None = None  # of the weight sync in progress; None if there is none
    sync_phase: str = ""  # such as "transferring"
    sync_age_s: float = 0.0  # time since the sync began
    sync_ranks: tuple[int, ...] = ()  # ranks that take part in it so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    name: str
    call: str = ""  # the ranks' call in progress, such as "next_batch for step 12"; "" if none
    waiting_ranks: tuple[int, ...] = ()  # ranks that wait for it, or for the ledger
    waiting_ages_s: tuple[float, ...] = ()  # for how long each of them has
    step: int = 0  # whose batch the ranks asked for last, from 1; 0 before the first
    groups_per_step: int = 0  # size of a batch
    groups_open: int = 0  # prompts that are being generated for, or wait to be trained on
    groups_ready: int = 0  # scored ones among them
    groups_leased: int = 0  # prompts that are being trained on
    groups_admitted: int = 0  # since the run began, as the next two
    groups_trained: int = 0
    groups_dropped: int = 0
    trajectories_open: int = 0  # completions that are not finished
    turns_waiting: int = 0  # requests that wait for an engine
    groups_scoring: int = 0  # groups that wait for the reward function
    scoring_s: float = 0.0  # age of the first of them
    groups_at_teacher: int = 0  # groups that have their rewards, and wait for the teacher
    tokens: int = 0  # generated so far for open groups
    problem: str = ""  # why its state is unknown; "" if it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    job: str  # its name, which no other job has
    time: float  # when it was read, in seconds since 1970
    phase: str  # who waits on whom, as a sentence
    failure: str  # why the job is lost; "" if it is not
    nodes: tuple[NodeStatus, ...]
    pools: tuple[PoolStatus, ...]
    rollouts: RolloutStatus | None = None  # None if there is no rollout manager

    @property
    def engines(self) -> list[tuple[str, EngineStatus]]:
        return [(pool.name, engine) for pool in self.pools for engine in pool.engines]

    @property
    def ranks(self) -> list[RankStatus]:
        found = [rank for node in self.nodes for rank in node.ranks]
        return sorted(found, key=lambda rank: rank.rank)

    @property
    def stopped(self) -> list[str]:
        """A line for each process that a signal has stopped."""
        found = [
            (node, name, pid)
            for node in self.nodes
            for name, pid, is_stopped in (
                *((f"rank {rank.rank}", rank.pid, rank.is_stopped) for rank in node.ranks),
                *((actor.name, actor.pid, actor.is_stopped) for actor in node.actors),
            )
            if is_stopped
        ]
        return [
            f"{name} (pid {pid}{f' on {node.node_id}' if len(self.nodes) > 1 else ''}) is stopped "
            f"by a signal: kill -CONT {pid} lets it continue"
            for node, name, pid in found
        ]


def describe_phase(
    ranks: Sequence[int], pools: Sequence[PoolStatus], rollouts: RolloutStatus | None
) -> str:
    """A sentence about who waits on whom. `ranks` are all ranks of the job."""
    for pool in pools:
        if pool.sync_version is not None:
            what = f"weights of version {pool.sync_version} to pool {pool.name}"
            late = name_ranks(set(ranks) - set(pool.sync_ranks))
            if late:
                return f"{name_ranks(pool.sync_ranks)} would sync {what}, and waits for {late}"
            return f"the ranks sync {what}: {pool.sync_phase}"
    if rollouts is None:
        return "the run is starting"
    if rollouts.problem:
        return f"{rollouts.name} does not answer: {rollouts.problem}"
    if rollouts.call:
        late = name_ranks(set(ranks) - set(rollouts.waiting_ranks))
        if late and rollouts.waiting_ranks:
            return f"{name_ranks(rollouts.waiting_ranks)} waits for {late} to call {rollouts.call}"
        return f"the ranks wait for {rollouts.call}: {_progress(rollouts)}"
    if rollouts.waiting_ranks:
        return "the ranks wait for the ledger, which writes what they get"
    return f"the ranks train: {_progress(rollouts)}" if rollouts.step else "the run is starting"


def _progress(rollouts: RolloutStatus) -> str:
    parts = [f"{rollouts.groups_ready} of {rollouts.groups_per_step} groups ready"]
    if rollouts.trajectories_open:
        parts.append(f"{rollouts.trajectories_open} trajectories in flight")
    if rollouts.turns_waiting:
        parts.append(f"{rollouts.turns_waiting} wait for an engine")
    if rollouts.groups_scoring:
        age = format_duration(rollouts.scoring_s)
        parts.append(f"{rollouts.groups_scoring} wait for the reward function, for {age}")
    if rollouts.groups_at_teacher:
        parts.append(f"{rollouts.groups_at_teacher} wait for the teacher")
    return ", ".join(parts)


def name_ranks(ranks: Sequence[int] | set[int]) -> str:
    """`rank 0` or `ranks 0, 2`; empty for none."""
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' * (len(ranks) > 1)} {numbers}" if ranks else ""


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
