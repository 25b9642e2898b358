"""The supervisor: the one process per node that owns every other process umbra starts there.

It keeps actors running (`supervised_actor`), keeps engines in their lifecycle and in sync
(`engine_pool`), notifies every attached rank when the job is lost, and leaves nothing behind. It is
an actor itself: its calls are the methods in `CALLS`, and the public ones of its `call_parts`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import zmq

from umbra.runtime.actor.job_rules import AfterRanks, JobRules, StopDecision
from umbra.runtime.actor.job_stop import JobStop
from umbra.runtime.actor.node_actors import ActorCalls, NodeActors
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.remote_actor import RemoteActor
from umbra.runtime.actor.supervised_actor import ActorState, NodeSettings, SupervisedActor
from umbra.runtime.cluster.attached_ranks import AttachedRank, AttachedRanks
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.job_nodes import JobNode, ranks_of, request_name
from umbra.runtime.cluster.run_events import EventKind, EventLog
from umbra.runtime.cluster.run_requests import JobRequest, JobRequests, SupervisorAddress
from umbra.runtime.errors import ActorNotFound, DeadlineExceeded, JobFailed
from umbra.runtime.pools.job_pools import JobPools
from umbra.runtime.pools.pool_calls import PoolCalls
from umbra.runtime.pools.warm_engines import WarmEngines
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.process.process_end import PidWatch
from umbra.runtime.reports.hang_bundle import JobBundles, NodeReport
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import from_wire, to_wire
from umbra.runtime.supervisor.state_collector import MetricsHost, ReportCalls, StateCollector
from umbra.runtime.waiting import first_of

if TYPE_CHECKING:
    from umbra.runtime.reports.job_state import JobState

logger = logging.getLogger(__name__)

# The news of a process's death may come this late after its broken connections. Longer delays every
# report of a rank; shorter names the wrong process on a busy machine.
_DEATH_NEWS_LIMIT_S: Final = 0.5
# Time to end the old ranks' actors: their grace, and the reaping.
_START_OVER_LIMIT_S: Final = 60.0
# How long engines stay warm on a node without ranks. Shorter: they start again where torchrun's
# rendezvous takes long. Longer: they stay longer on a node that is cut off, whose torchrun waits
# for the rendezvous.
_WARM_LIMIT_S: Final = 120.0


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
    """Owns all actors and pools of a node. `run()` lives until `over` is set."""

    CALLS: Final = (
        *("attach", "detach", "fail_job", "pass_on_signal", "join_job"),  # by ranks
        *("join", "report", "bundle_late"),  # by supervisors
        *("generate", "request"),  # by programs on this node
        *("note", "record"),  # by the rollout manager, see `OperatorMessages`
    )

    def __init__(self, node: NodeSettings, config: SupervisorConfig, client: Client) -> None:
        self._config = config
        self._node = node
        run_dir = Path(config.run_dir) if config.run_dir else None
        self._requests = None if run_dir is None else JobRequests(run_dir, self._take)
        self._events = None if run_dir is None else EventLog(run_dir)
        self._tcp_endpoint = ""
        self._request_name = secrets.token_hex(8)  # see `JobNode.job`
        self._waiting: JobRequest | None = None  # until the nodes have met again
        self._taken: set[str] = set()  # tokens of requests
        self._round_id = ""  # of torchrun's rendezvous
        self._tasks: asyncio.TaskGroup
        self._started_over = asyncio.Event()
        self._started_over.set()
        self._rules = JobRules(nodes_may_change=config.nodes_may_change)
        self._context = self._make_context(client)
        self._links, self._ranks = self._context.links, self._context.ranks
        self._job_stop, self.over = self._context.job_stop, self._context.over
        self._make_parts(run_dir)

    def _make_context(self, client: Client) -> NodeContext:
        return NodeContext(
            node=self._node,
            client=client,
            sockets=zmq.Context(),
            rules=self._rules,
            job_stop=JobStop(),
            links=JobLinks(client),
            ranks=AttachedRanks(on_event=self._on_rank_event),
            note=self.note,
            record=self.record,
            over=asyncio.Event(),
        )

    def _make_parts(self, run_dir: Path | None) -> None:
        context, links = self._context, self._links
        folder = run_dir if run_dir is not None and self._config.is_lead else self._node.log_dir
        self._warm = WarmEngines(context)
        self._actors = NodeActors(context, self, folder / "processes.json", self._warm.take)
        self._pools = JobPools(context, self._actors, self._warm)
        self.actor_calls = ActorCalls(
            self._actors,
            links=links,
            check_may_stop=self._pools.check_may_stop,
            check_may_restart=self._pools.check_may_restart,
        )
        self._states = StateCollector(context, self._actors, self._pools.all)
        report = NodeReport(self._node, context.client, self._actors, self._ranks)
        self._bundles = JobBundles(run_dir, report, links=links, state=self._read_state)
        self._metrics = MetricsHost(run_dir, self._read_state)
        self.call_parts = (
            self.actor_calls,
            PoolCalls(self._pools, links),
            ReportCalls(self._ranks, self._states, self._bundles, self._metrics, self._read_state),
        )

    async def attach(
        self,
        rank: int,
        local_world_size: int,
        pid: int,
        incarnation: int,
        may_restart: bool,
        round_id: str = "",
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A rank's stream of events, open as long as the rank lives: its end is noticed here.

        Events: {"kind": "attached", "tcp_endpoint", "epoch", "job"}, {"kind": "failed", "message"},
        {"kind": "note", "text"}, {"kind": "signal", "number", "grace_s"}, {"kind": "nodes",
        "nodes", "epoch"}. `round_id` is torchrun's, see `TorchrunEnvironment`.
        """
        is_new_round = self._round_id not in ("", round_id)
        if is_new_round and process_stat(pid) is None:
            return  # torchrun ends all ranks before the next round: it was a rank of an earlier one
        if incarnation > self._ranks.incarnation or is_new_round:
            if self._rules.is_for_good:
                raise JobFailed("the job was stopped; torchrun is about to end")
            self._start_over(incarnation)
        self._rules.may_restart = may_restart
        self._round_id = round_id
        try:
            async with asyncio.timeout(_START_OVER_LIMIT_S):
                await self._started_over.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"actors of the ranks before their restart have not ended within "
                f"{_START_OVER_LIMIT_S:.0f} s; see the supervisor's log"
            ) from None
        details = {"tcp_endpoint": self._tcp_endpoint, "epoch": self._links.epoch}
        me = self._ranks.add(rank, pid, **details, job=self._request_name)
        # The supervisor notices its death before its peers can report broken connections.
        watch = PidWatch(pid, lambda: me.put({"kind": "gone"}))
        try:
            while True:
                event = await me.events.get()
                if event["kind"] in ("detached", "gone"):
                    return
                yield event
        finally:
            watch.close()
            if self._ranks.remove(me):
                self._on_rank_gone(me, local_world_size)

    def _start_over(self, incarnation: int) -> None:
        """Torchrun has restarted the ranks: the old ranks' actors end, and engines stay warm. Their
        weights are no longer valid, so they wait for a sync of the new ranks."""
        logger.info("the ranks were restarted (incarnation %d)", incarnation)
        self.record(f"torchrun has restarted the ranks ({incarnation})", "restart", "ranks")
        self._job_stop.withdraw()
        self._rules.start_over()
        for rank in self._ranks.start_over(incarnation):
            self._end_syncs_of(rank)
        if self._rules.has_epochs:
            self._links.start_over()
            self._ranks.forget_nodes()
        if self._started_over.is_set():  # else the actors of an earlier restart are still ending
            self._started_over.clear()
            self._tasks.create_task(self._end_all_but_engines(), name="start-over")

    async def _end_all_but_engines(self) -> None:
        try:
            await self._pools.start_over()
        except DeadlineExceeded as error:
            self.end("starting over", str(error))
            return
        self._started_over.set()

    def detach(self, rank: int) -> None:
        """Called by a rank before it leaves: its stream of events ends, and its end is expected."""
        self._ranks.detach(rank)

    async def fail_job(self, who: str, message: str, missed_deadline: bool = False) -> str:
        """Called by a rank: the job is lost. Every rank is notified; the first failure counts.

        A rank whose collective broke because another died is often faster than the news of that
        death, so its report waits a moment for it. If it `missed_deadline`, a bundle shows the
        processes before they end; the returned text, for the end of the error, says what it shows
        and where it is.
        """
        await self._ranks.await_failure(_DEATH_NEWS_LIMIT_S)
        found = ""
        if missed_deadline and not self._ranks.has_failed:
            found = await self.bundle_late(f"{who} failed: {message}")
        self._ranks.fail(who, f"{message}\n{found}" if found else message)
        return found

    async def bundle_late(self, why: str) -> str:
        """See `JobBundles.late`. Another node's supervisor calls it, too."""
        return await self._bundles.late(why, self._tasks)

    async def explain_late(self, why: str) -> str:
        found = await self.bundle_late(why)
        return f"\n{found}" if found else ""

    async def _read_state(self) -> JobState:
        return await self._states.job(self._request_name)

    def end(self, who: str, why: str) -> None:
        """Ends the job for a reason outside it; waiting ranks are notified."""
        self._ranks.fail(who, why)
        self.over.set()

    def end_for(self, part: str, why: str) -> None:
        """Ends the job for a part of this node that failed."""
        where = self._links.name_of_this_node()
        self.end(f"{part} of {where}" if where else part, why)

    def pass_on_signal(self, rank: int, incarnation: int, number: int) -> None:
        """Called by a rank that got a stop signal, which may have reached it alone."""
        if incarnation == self._ranks.incarnation:
            self._job_stop.request()
        self._ranks.pass_on_signal(_got(f"rank {rank}", number), incarnation, number)

    def request(self, call: dict[str, Any]) -> None:
        """Called for `umbra stop`, `preempt`, `drain` and `dump`, with a `JobRequest`. Raises
        ActorNotFound if it is addressed to another job, or that has no such node."""
        self._take(from_wire(JobRequest, call))

    def _take(self, request: JobRequest) -> None:
        """Acts on a request once: a client whose call is answered late leaves it as a file, too."""
        if request.token not in self._taken:
            self._act_on(request)
            self._taken.add(request.token)

    def _act_on(self, request: JobRequest) -> None:
        if request.job != self._request_name:
            raise ActorNotFound(f"job {request.job} has ended; {self._request_name} is running")
        if request.kind == "dump" and self._links.lead is None:
            writing = self._bundles.write(request.bundle, "umbra dump asked for this bundle")
            self._tasks.create_task(writing, name="bundle")
        elif request.kind == "drain":
            self._links.dismiss(self._links.find_generator(request.node), "")
        elif self._rules.request_must_wait(
            has_met=self._links.has_met, has_ranks=len(self._ranks) > 0
        ):
            self._waiting = request
        elif self._links.lead is not None:
            self._links.tell_lead({"kind": "request", "request": to_wire(request)})
        else:
            self._rules.is_for_good = True
            self._links.tell({"kind": "stopped for good"})
            cause = f"{request.asker} asked for it, within {request.grace_s:g} s"
            self.stop_job(request.number, request.grace_s, cause)

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
                self._job_stop.request()
        cause, ranks = cause or _got("the supervisor", number), self._ranks
        is_first = ranks.pass_on_signal(cause, ranks.incarnation, number, grace_s)
        has_failed = ranks.has_failed
        if self._rules.is_preempted(number, is_first_signal=is_first, has_failed=has_failed):
            assert self._requests is not None
            self._tasks.create_task(self._requests.mark_preempted(), name="mark-preempted")
        if not len(ranks):
            self.over.set()

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

    def _on_rank_event(self, event: dict[str, Any]) -> None:
        self._links.tell(event)
        if event["kind"] == "failed":
            self.record(event["message"], "failed", "job")
        else:
            self.record(f"{event['cause']}: all ranks stop", "stop", "job")

    def _on_rank_gone(self, gone: AttachedRank, local_world_size: int) -> None:
        if not self._ranks.has_detached(gone.rank):
            self._end_syncs_of(gone.rank)
            self._ranks.fail(
                f"rank {gone.rank}",
                f"its process (pid {gone.pid}) ended without a report: it was killed (out of "
                "memory?) or crashed; see its last output",
            )
        if len(self._ranks):
            return
        match self._rules.after_last_rank(
            has_failed=self._ranks.has_failed,
            was_stopped=self._ranks.was_stopped,
            have_all_detached=self._ranks.num_detached >= local_world_size,
        ):
            case AfterRanks.OVER:
                self.over.set()
            case AfterRanks.KEEP_ENGINES:
                self._pools.stop_others()  # this node may be cut off, and another one have its role
                self._tasks.create_task(self._await_ranks(), name="await-ranks")
            case AfterRanks.KEEP:
                pass

    async def _await_ranks(self) -> None:
        """Ends the job here if torchrun starts no ranks on this node."""
        try:
            async with asyncio.timeout(_WARM_LIMIT_S):
                await first_of(self._ranks.attached, self.over)
        except TimeoutError:
            logger.info("no ranks for %g s: ending the engines", _WARM_LIMIT_S)
            self._rules.is_for_good = self._waiting is not None
            self.over.set()

    def _end_syncs_of(self, lost_rank: int) -> None:
        for pool in self._pools.all():
            pool.sync.rank_lost(lost_rank)
        self._links.tell_lead({"kind": "rank_lost", "rank": lost_rank})

    async def join_job(
        self, nodes: list[dict[str, Any]], node: int, epoch: int, timeout_s: float
    ) -> None:
        """Called by local rank 0: links the supervisors of all nodes (`JobNode`s, by rank). Engines
        of the last epoch are at rest on all nodes before rank 0 learns that the nodes have met: a
        member joins the lead when its own are. Raises DeadlineExceeded if a supervisor is missing.
        """
        parsed = [from_wire(JobNode, raw) for raw in nodes]
        self._rules.begin_epoch()
        self._links.begin(parsed, node, epoch, self, self._tasks)
        if self._rules.has_epochs:
            self._request_name = request_name(parsed)
            await self._set_lead(node == 0)
            await self._warm.keep(self._actors.own())
        warm = [to_wire(spec) for spec in self._warm.specs()]
        if await self._links.connect(epoch, warm, timeout_s, self._tasks):
            self._ranks.tell_nodes(nodes, epoch)
            if self._waiting is not None:
                request, self._waiting = self._waiting, None
                self._act_on(request)

    async def _set_lead(self, is_lead: bool) -> None:
        """Takes or gives up the role of rank 0's node, where the job is found."""
        if self._requests is None:
            return
        if not is_lead:
            self._requests.is_lead = False
            await self._metrics.close()
            return
        address = SupervisorAddress(
            job=self._request_name,
            node_id=self._node.node_id,
            pid=os.getpid(),
            socket_dir=str(self._node.socket_dir),
            tcp_endpoint=self._tcp_endpoint,
            secret_file=self._config.secret_file,
            has_trace=bool(self._node.trace_dir),
        )
        await self._requests.post(address)

    async def join(
        self, epoch: int, node: int, warm: list[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        async for event in self._links.join(epoch, node, warm):
            yield event

    async def report(self, epoch: int, node: int, event: dict[str, Any]) -> None:
        await self._links.report(epoch, node, event)

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
                self._job_stop.request()
                cause = f"{cause} (node {node})"
                self._ranks.pass_on_signal(cause, self._ranks.incarnation, number, grace_s)
            case {"kind": "stopped for good"}:
                self._rules.is_for_good = True
                if self._config.torchrun_pid and not len(self._ranks):
                    self.over.set()
            case {"kind": "request"}:
                self._take(from_wire(JobRequest, event["request"]))
            case {"kind": "rank_lost", "rank": int(rank)}:
                self._end_syncs_of(rank)
            case {"kind": "note", "text": str(text), "about": [kind, who]}:
                self.note(text, kind, who)
            case {"kind": "dismissed", "why": str(why)}:
                if why:
                    self._ranks.fail_as(why)
                self.over.set()
            case _:
                logger.error("node %d sent an event that this one does not know: %s", node, event)

    async def generate(
        self, lead: dict[str, Any], me: dict[str, Any], timeout_s: float
    ) -> AsyncGenerator[str, None]:
        """Called by `umbra.runtime.node`: this node, which has no ranks, generates for a running
        job until that is over. It leaves, and this supervisor ends, when the stream is closed.

        `lead` and `me` are rank 0's node and this one, each a `JobNode`. Yields lines for the
        person who started the program. Raises ConfigError if the job cannot use this node,
        JobFailed if the job or this node's engines have failed, or it cannot be reached.
        """
        try:
            nodes = from_wire(JobNode, lead), from_wire(JobNode, me)
            node = await self._links.generate_for(*nodes, timeout_s, self, self._tasks)
            yield f"joined as node {node}"
            await first_of(self._links.ended, self._ranks.failed, self.over)
            if failure := self._ranks.failure:
                self._links.tell_lead({"kind": "note", "text": f"node {node}: {failure}"})
                raise JobFailed(failure)
            yield "the job is over" if self._links.ended.is_set() else "left the job, as asked"
        finally:
            self.over.set()

    def on_node_left(self, node: int) -> None:
        if self._links.only_generates(node):
            self._pools.remove_generator(node, "has left", "left")

    def on_node_lost(self, node: int, why: str) -> None:
        nodes = self._links.nodes
        if self._links.only_generates(node) and self._links.lead is None:
            self._pools.remove_generator(node, f"cannot be reached any more: {why}", "lost")
            return
        name = f"node {node} ({nodes[node].node_id})"
        why = f"it cannot be reached any more: {why}"
        self.record(f"{name}: {why}", "lost", nodes[node].node_id)
        self._mark_interrupted()
        if self._rules.lose_node():
            self._ranks.fail(name, why)  # the others may continue without it
        else:
            self.end(name, why)  # before syncs fail for it
        for rank in ranks_of(nodes, node):
            self._end_syncs_of(rank)

    def _mark_interrupted(self) -> None:
        """Lets the launcher start the job again, unless the nodes meet again before it ends."""
        if self._requests is not None:
            self._tasks.create_task(self._requests.mark_preempted(), name="mark-preempted")

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
                for rank in ranks_of(self._links.nodes, node):
                    self._end_syncs_of(rank)
            self._ranks.fail(actor.spec.name, actor.failure)

    def on_actor_change(self, actor: SupervisedActor) -> None:
        for pool in self._pools.all():
            pool.on_actor_change(actor)
        # A failed first start is the answer to `spawn`, not the job's failure.
        if actor.state == ActorState.FAILED and actor.has_run:
            if actor.spec.essential:
                self._ranks.fail(actor.spec.name, actor.failure)
            else:
                self.record(actor.failure, "fault", actor.spec.name)

    async def run(self, tcp_endpoint: str = "") -> None:
        """Runs until the job is over; then ends every actor and returns. `tcp_endpoint` is where
        other nodes reach this supervisor; "" for none."""
        self._tcp_endpoint = tcp_endpoint
        try:
            await self._run_actors()
        finally:
            if self._requests is not None:
                await self._requests.withdraw()
            self._context.sockets.destroy(linger=0)
            self._forget_keys()

    def _forget_keys(self) -> None:
        """Removes the file of keys on rank 0's node, unless the others may continue without it."""
        is_lead = self._requests is not None and self._requests.is_lead
        is_last = self._rules.may_forget_keys(has_failed=self._ranks.has_failed)
        if self._config.owns_keys and is_lead and is_last:
            Path(self._config.secret_file).unlink(missing_ok=True)

    async def _run_actors(self) -> None:
        async with (
            self._pools.open(),
            asyncio.TaskGroup() as self._tasks,
        ):
            if self._events is not None:
                self._tasks.create_task(self._events.run(), name="events")
            async with self._actors.open():
                await self._await_end()
            await self._metrics.close()
            if self._events is not None:
                self._events.close()
            self._pools.close()
            await self._links.leave()

    async def _await_end(self) -> None:
        """Returns when the job is over, and ends torchrun then if it has to."""
        if self._config.is_lead:
            await self._set_lead(True)
        looking = [self._tasks.create_task(self._ranks.watch_stops(self.note), name="stopped")]
        if self._requests is not None:
            looking.append(self._tasks.create_task(self._requests.look(), name="requests"))
        await self.over.wait()
        for task in looking:
            task.cancel()
        if self._rules.ends_torchrun and self._config.torchrun_pid:
            logger.info("the job was stopped: ending torchrun (pid %d)", self._config.torchrun_pid)
            try:
                os.kill(self._config.torchrun_pid, signal.SIGTERM)
            except OSError as error:  # it has ended, or belongs to another user
                logger.warning("cannot end torchrun (pid %d): %s", self._config.torchrun_pid, error)


def _got(receiver: str, number: int) -> str:
    return f"{receiver} got {signal.Signals(number).name}"
