"""The supervisor: the one process per node that owns every other process umbra starts there.

It keeps actors running (`supervised_actor`), keeps engines in their lifecycle and in sync
(`engine_pool`), notifies every attached rank when the job is lost, and leaves nothing behind. It is
an actor itself, whose calls are the public methods of the objects in `calls`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from umbra.runtime.actor.job_rules import JobRules, StopDecision
from umbra.runtime.actor.node_actors import ActorCalls, NodeActors
from umbra.runtime.actor.node_context import NodeContext, NodeSettings
from umbra.runtime.actor.remote_actor import RemoteActor
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.cluster.attached_ranks import AttachedRanks
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.job_nodes import JobNode, ranks_of
from umbra.runtime.cluster.run_events import EventKind, EventLog
from umbra.runtime.cluster.run_requests import JobRequest, JobRequests, SupervisorAddress
from umbra.runtime.errors import ActorNotFound, JobFailed
from umbra.runtime.pools.job_pools import JobPools, PoolCalls
from umbra.runtime.pools.warm_engines import WarmEngines
from umbra.runtime.reports.hang_bundle import JobBundles
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import from_wire, to_wire
from umbra.runtime.supervisor.rank_calls import RankCalls
from umbra.runtime.supervisor.state_collector import MetricsHost, ReportCalls, StateCollector
from umbra.runtime.waiting import first_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """Settings that a rank, or the program of a node that only generates, passes on the standard
    input of the supervisor that it starts."""

    node_id: str
    log_dir: str
    run_dir: str  # "" on a node that only generates
    socket_dir: str
    tcp_host: str  # address to offer to other nodes; "" for none (then no keys are needed)
    secret_file: str  # path of the job's keys; "" for none
    log_level: int
    trace_dir: str = ""  # folder of the run's trace; "" for none
    is_lead: bool = False  # whether this is rank 0's node from start to end
    # Whether torchrun may start the ranks again on other nodes. Which node is rank 0's, and the
    # links to the others, then belong to an epoch.
    nodes_may_change: bool = False
    owns_keys: bool = False  # whether `secret_file` ends with the job, and no rank removes it
    # `secret_file`, if it ends with this node's part of the job. The supervisor removes it if the
    # guardian, which would, is lost.
    keys_to_remove: str = ""
    torchrun_pid: int = 0  # of the agent that starts this node's ranks; 0 for none

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        return cls(**json.loads(data))


class Supervisor:
    """Owns all actors and pools of a node. `run()` lives until the job is over here. `calls` are
    the objects whose public methods answer calls."""

    def __init__(self, node: NodeSettings, config: SupervisorConfig, client: Client) -> None:
        self._config = config
        self._node = node
        run_dir = Path(config.run_dir) if config.run_dir else None
        self._requests = None if run_dir is None else JobRequests(run_dir, self.take_request)
        self._events = None if run_dir is None else EventLog(run_dir)
        self._waiting: JobRequest | None = None  # until the nodes have met again
        self._taken: set[str] = set()  # tokens of requests
        self._links, self._ranks = JobLinks(client), AttachedRanks(self._on_rank_event)
        self.notes = JobNotes(self._ranks, self._links, self._requests, self._events)
        self._rules = JobRules(nodes_may_change=config.nodes_may_change)
        self._context = NodeContext(
            node=node,
            client=client,
            rules=self._rules,
            links=self._links,
            ranks=self._ranks,
            note=self.notes.note,
            record=self.notes.record,
        )
        self._make_parts(run_dir)

    def _make_parts(self, run_dir: Path | None) -> None:
        context = self._context
        folder = run_dir if run_dir is not None and self._config.is_lead else self._node.log_dir
        warm = WarmEngines(context)
        self._actors = NodeActors(context, self, folder / "processes.json", warm.take)
        self._pools = JobPools(context, self._actors, warm)
        states = StateCollector(context, self._actors, self._pools.all)
        self._bundles = JobBundles(run_dir, context, self._actors, states.job)
        self._metrics = MetricsHost(run_dir, states.job)
        self.rank_calls = RankCalls(context, self._pools, self._bundles, self.end_without_ranks)
        self.actor_calls = ActorCalls(
            self._actors,
            links=self._links,
            check_may_stop=self._pools.check_may_stop,
            check_may_restart=self._pools.check_may_restart,
        )
        self.calls = (
            self.rank_calls,
            NodeCalls(self, context, self._pools),
            self.actor_calls,
            PoolCalls(self._pools, self._links),
            ReportCalls(states, self._bundles, self._metrics),
            self.notes,
        )

    async def run(self, tcp_endpoint: str = "") -> None:
        """Runs until the job is over; then ends every actor and returns. `tcp_endpoint` is where
        other nodes reach this supervisor; "" for none."""
        self._links.tcp_endpoint = tcp_endpoint
        try:
            await self._run_actors()
        finally:
            if self._requests is not None:
                await self._requests.withdraw()
            self._context.sockets.destroy(linger=0)
            self._forget_keys()

    async def _run_actors(self) -> None:
        async with self._pools.open(), self._context.tasks as tasks:
            if self._events is not None:
                tasks.create_task(self._events.run(), name="events")
            async with self._actors.open():
                await self._await_end(tasks)
            await self._metrics.close()
            if self._events is not None:
                self._events.close()
            self._pools.close()
            await self._links.leave()

    async def _await_end(self, tasks: asyncio.TaskGroup) -> None:
        """Returns when the job is over, and ends torchrun then if it has to."""
        if self._config.is_lead:
            await self.set_lead(True)
        looking = [tasks.create_task(self._ranks.watch_stops(self.notes.note), name="stopped")]
        if self._requests is not None:
            looking.append(tasks.create_task(self._requests.look(), name="requests"))
        await self._context.over.wait()
        for task in looking:
            task.cancel()
        if self._rules.ends_torchrun and self._config.torchrun_pid:
            logger.info("the job was stopped: ending torchrun (pid %d)", self._config.torchrun_pid)
            try:
                os.kill(self._config.torchrun_pid, signal.SIGTERM)
            except OSError as error:  # it has ended, or belongs to another user
                logger.warning("cannot end torchrun (pid %d): %s", self._config.torchrun_pid, error)

    def _forget_keys(self) -> None:
        """Removes the file of keys on rank 0's node, unless the others may continue without it."""
        is_lead = self._requests is not None and self._requests.is_lead
        is_last = self._rules.may_forget_keys(has_failed=self._ranks.has_failed)
        if self._config.owns_keys and is_lead and is_last:
            Path(self._config.secret_file).unlink(missing_ok=True)

    async def set_lead(self, is_lead: bool) -> None:
        """Takes or gives up the role of rank 0's node, where the job is found."""
        if self._requests is None:
            return
        if not is_lead:
            self._requests.is_lead = False
            await self._metrics.close()
            return
        address = SupervisorAddress(
            job=self._links.job,
            node_id=self._node.node_id,
            pid=os.getpid(),
            socket_dir=str(self._node.socket_dir),
            tcp_endpoint=self._links.tcp_endpoint,
            secret_file=self._config.secret_file,
            has_trace=bool(self._node.trace_dir),
        )
        await self._requests.post(address)

    def end(self, who: str, why: str) -> None:
        """Ends the job for a reason outside it; waiting ranks are notified."""
        self._ranks.fail(who, why)
        self._context.over.set()

    def end_for(self, part: str, why: str) -> None:
        """Ends the job for a part of this node that failed."""
        where = self._links.name_of_this_node()
        self.end(f"{part} of {where}" if where else part, why)

    def end_without_ranks(self) -> None:
        """Ends the job here, because torchrun starts no ranks: for good if a request waits."""
        self._rules.is_for_good = self._waiting is not None
        self._context.over.set()

    @property
    def is_stopping(self) -> bool:
        return self._rules.is_stopping

    def stop_job(self, number: int, grace_s: float | None = None, cause: str = "") -> None:
        """A stop signal reached this process or the guardian, or a request asks for one. The ranks
        stop as if it had reached them, and the job is over when the last has left. A second signal,
        after a moment, does not wait for them, unless it is a preemption."""
        match self._rules.stop(number, time.monotonic()):
            case StopDecision.IGNORE:
                return
            case StopDecision.END:
                why = "a second signal stopped it before the ranks had left"
                self.end_for("the supervisor", why)
                return
            case StopDecision.STOP_RANKS:
                self._context.job_stop.request()
        cause = cause or f"the supervisor got {signal.Signals(number).name}"
        ranks = self._ranks
        is_first = ranks.pass_on_signal(cause, ranks.incarnation, number, grace_s)
        has_failed = ranks.has_failed
        if self._rules.is_preempted(number, is_first_signal=is_first, has_failed=has_failed):
            self._mark_interrupted()
        if not len(ranks):
            self._context.over.set()

    def _mark_interrupted(self) -> None:
        """Lets the launcher start the job again, unless the nodes meet again before it ends."""
        if self._requests is not None:
            marking = self._requests.mark_preempted()
            self._context.tasks.create_task(marking, name="mark-preempted")

    def take_request(self, request: JobRequest) -> None:
        """Acts on a request once: a client whose call is answered late leaves it as a file, too."""
        if request.token not in self._taken:
            self._act_on(request)
            self._taken.add(request.token)

    def act_on_waiting(self) -> None:
        """The nodes have met again."""
        request, self._waiting = self._waiting, None
        if request is not None:
            self._act_on(request)

    def _act_on(self, request: JobRequest) -> None:
        links = self._links
        if request.job != links.job:
            raise ActorNotFound(f"job {request.job} has ended; {links.job} is running")
        if request.kind == "dump" and links.lead is None:
            writing = self._bundles.write(request.bundle, "umbra dump asked for this bundle")
            self._context.tasks.create_task(writing, name="bundle")
        elif request.kind == "drain":
            links.dismiss(links.find_generator(request.node), "")
        elif self._rules.request_must_wait(has_met=links.has_met, has_ranks=len(self._ranks) > 0):
            self._waiting = request
        elif links.lead is not None:
            links.tell_lead({"kind": "request", "request": to_wire(request)})
        else:
            self._rules.is_for_good = True
            links.tell({"kind": "stopped for good"})
            cause = f"{request.asker} asked for it, within {request.grace_s:g} s"
            self.stop_job(request.number, request.grace_s, cause)

    async def explain_late(self, why: str) -> str:
        found = await self._bundles.late(why)
        return f"\n{found}" if found else ""

    def on_actor_change(self, actor: SupervisedActor) -> None:
        for pool in self._pools.all():
            pool.on_actor_change(actor)
        # A failed first start is the answer to `spawn`, not the job's failure.
        if actor.state == ActorState.FAILED and actor.has_run:
            if actor.spec.essential:
                self._ranks.fail(actor.spec.name, actor.failure)
            else:
                self.notes.record(actor.failure, "fault", actor.spec.name)

    def on_remote_change(self, node: int, actor: RemoteActor) -> None:
        for pool in self._pools.all():
            pool.on_actor_change(actor)
        if node >= len(self._links.nodes):
            return  # of an epoch that is over
        if self._links.only_generates(node):
            self._pools.on_generator_change(node, actor)
            return
        is_lost = actor.state == ActorState.FAILED and actor.has_run
        if is_lost and actor.spec.essential and not self._links.has_left(node):
            if actor.is_node_lost:  # the node's link notices that only by its silence
                self._mark_interrupted()
                self._end_syncs_of(node)
            self._ranks.fail(actor.spec.name, actor.failure)

    def _on_rank_event(self, event: dict[str, Any]) -> None:
        self._links.tell(event)
        if event["kind"] == "failed":
            self.notes.record(event["message"], "failed", "job")
        else:
            self.notes.record(f"{event['cause']}: all ranks stop", "stop", "job")

    def on_node_event(self, node: int, event: dict[str, Any]) -> None:
        match event:
            case {"kind": "failed", "message": str(message)}:
                self._ranks.fail_as(message)
            case {
                "kind": "signal",
                "number": int(number),
                "grace_s": float() | None as grace_s,
                "cause": str(cause),
            }:
                self._context.job_stop.request()
                cause = f"{cause} (node {node})"
                self._ranks.pass_on_signal(cause, self._ranks.incarnation, number, grace_s)
            case {"kind": "stopped for good"}:
                self._rules.is_for_good = True
                if self._config.torchrun_pid and not len(self._ranks):
                    self._context.over.set()
            case {"kind": "request"}:
                self.take_request(from_wire(JobRequest, event["request"]))
            case {"kind": "rank_lost", "rank": int(rank)}:
                self._pools.rank_lost(rank)
            case {"kind": "note", "text": str(text), "about": [kind, who]}:
                self.notes.note(text, kind, who)
            case {"kind": "dismissed", "why": str(why)}:
                if why:
                    self._ranks.fail_as(why)
                self._context.over.set()
            case _:
                logger.error("node %d sent an event that this one does not know: %s", node, event)

    def on_node_left(self, node: int) -> None:
        if self._links.only_generates(node):
            self._pools.remove_generator(node, "has left", "left")

    def on_node_lost(self, node: int, why: str) -> None:
        if self._links.only_generates(node) and self._links.lead is None:
            self._pools.remove_generator(node, f"cannot be reached any more: {why}", "lost")
            return
        node_id = self._links.nodes[node].node_id
        name = self._links.name_of(node)
        why = f"it cannot be reached any more: {why}"
        self.notes.record(f"{name}: {why}", "lost", node_id)
        self._mark_interrupted()
        if self._rules.lose_node():
            self._ranks.fail(name, why)
        else:
            self.end(name, why)  # before syncs fail for it
        self._end_syncs_of(node)

    def _end_syncs_of(self, node: int) -> None:
        for rank in ranks_of(self._links.nodes, node):
            self._pools.rank_lost(rank)


class NodeCalls:
    """The supervisor's calls that link it to those of other nodes, and requests to the job."""

    def __init__(self, supervisor: Supervisor, context: NodeContext, pools: JobPools) -> None:
        self._supervisor = supervisor
        self._context = context
        self._rules = context.rules
        self._ranks = context.ranks
        self._links = context.links
        self._pools = pools

    async def join_job(
        self, nodes: list[dict[str, Any]], node: int, epoch: int, timeout_s: float
    ) -> None:
        """Called by local rank 0: links the supervisors of all nodes (`JobNode`s, by rank). Engines
        of the last epoch are at rest on all nodes before rank 0 learns that the nodes have met: a
        member joins the lead when its own are. Raises DeadlineExceeded if a supervisor is missing.
        """
        parsed = [from_wire(JobNode, raw) for raw in nodes]
        self._rules.begin_epoch()
        self._links.begin(parsed, node, epoch, self._supervisor, self._context.tasks)
        if self._rules.has_epochs:
            await self._supervisor.set_lead(node == 0)
        warm = await self._pools.keep_warm()
        if await self._links.connect(epoch, warm, timeout_s, self._context.tasks):
            self._ranks.tell_nodes(nodes, epoch)
            self._supervisor.act_on_waiting()

    async def join(
        self, epoch: int, node: int, warm: list[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        async for event in self._links.join(epoch, node, warm):
            yield event

    async def report(self, epoch: int, node: int, event: dict[str, Any]) -> None:
        await self._links.report(epoch, node, event)

    async def generate(
        self, lead: dict[str, Any], me: dict[str, Any], timeout_s: float
    ) -> AsyncGenerator[str, None]:
        """Called by `umbra.runtime.node`: this node, which has no ranks, generates for a running
        job until that is over. It leaves, and this supervisor ends, when the stream is closed.

        `lead` and `me` are rank 0's node and this one, each a `JobNode`. Yields lines for the
        person who started the program. Raises ConfigError if the job cannot use this node,
        JobFailed if the job or this node's engines have failed, or it cannot be reached.
        """
        over, tasks = self._context.over, self._context.tasks
        try:
            nodes = from_wire(JobNode, lead), from_wire(JobNode, me)
            node = await self._links.generate_for(*nodes, timeout_s, self._supervisor, tasks)
            yield f"joined as node {node}"
            await first_of(self._links.ended, self._ranks.failed, over)
            if failure := self._ranks.failure:
                text, about = f"node {node}: {failure}", ("fault", self._context.node.node_id)
                note = {"kind": "note", "text": text, "about": about}
                self._links.tell_lead(note)
                raise JobFailed(failure)
            yield "the job is over" if self._links.ended.is_set() else "left the job, as asked"
        finally:
            over.set()

    def request(self, call: dict[str, Any]) -> None:
        """Called for `umbra stop`, `preempt`, `drain` and `dump`, with a `JobRequest`. Raises
        ActorNotFound if it is addressed to another job, or that has no such node."""
        self._supervisor.take_request(from_wire(JobRequest, call))


class JobNotes:
    """Lines about the job. The rollout manager calls both, see `OperatorMessages`."""

    def __init__(
        self,
        ranks: AttachedRanks,
        links: JobLinks,
        requests: JobRequests | None,
        events: EventLog | None,
    ) -> None:
        self._ranks = ranks
        self._links = links
        self._requests = requests
        self._events = events

    def note(self, text: str, kind: EventKind = "note", who: str = "") -> None:
        """Shows one line to the person who runs the job, on rank 0's output, and records it. `who`
        is the actor, pool or node that it is about."""
        self._ranks.note(text)
        self._links.tell_lead({"kind": "note", "text": text, "about": [kind, who]})
        self.record(text, kind, who)

    def record(self, text: str, kind: EventKind, who: str) -> None:
        """Writes an event to events.jsonl, if this is rank 0's node."""
        if self._events is not None and self._requests is not None and self._requests.is_lead:
            self._events.add(kind, who, text)
