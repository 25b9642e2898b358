"""The supervisor: the one process per node that owns every other process umbra starts there.

It keeps actors running (`supervised_actor`), keeps engines in their lifecycle and in sync
(`engine_pool`), notifies every attached rank when the job is lost, and leaves nothing behind. It is
an actor itself: its public methods are its RPC interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_stop import STOP_WINDOW_S, JobStop
from umbra.runtime.actor.supervised_actor import ActorState, NodeSettings, SupervisedActor
from umbra.runtime.cluster.attached_ranks import AttachedRank, AttachedRanks
from umbra.runtime.cluster.gpu_shortage import RankMemory, read_gpu_memory
from umbra.runtime.cluster.job_nodes import JobNode, ranks_of
from umbra.runtime.cluster.job_requests import JobRequests
from umbra.runtime.cluster.node_links import JobLinks
from umbra.runtime.cluster.run_notice import PREEMPT_SIGNAL, JobRequest
from umbra.runtime.cluster.socket_dir import MAX_SOCKET_PATH_NBYTES
from umbra.runtime.errors import (
    ActorNotFound,
    ConfigError,
    DeadlineExceeded,
    JobFailed,
    MailboxClosed,
)
from umbra.runtime.first_of import first_of
from umbra.runtime.pools.hosted_engines import HostedEngines
from umbra.runtime.pools.remote_actor import EngineActor, RemoteActor
from umbra.runtime.process.pid_watch import PidWatch
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.settings import from_wire
from umbra.runtime.weights.transports.shared_memory.memfd import FdServer, serve_fds

if TYPE_CHECKING:
    from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag
    from umbra.runtime.pools.engine_pool import EnginePool
    from umbra.runtime.pools.node_pools import NodePools

logger = logging.getLogger(__name__)

# How much later than its broken connections a process's death may be noticed. A longer wait delays
# every report of a rank; a shorter one names the wrong process on a busy machine.
_DEATH_NEWS_LIMIT_S: Final = 0.5
# Time to end the old ranks' actors: their grace, and the reaping.
_START_OVER_LIMIT_S: Final = 60.0


class Supervisor:
    """Owns all actors and pools of a node. `run()` lives until `over` is set.

    Args:
        run_dir: None on all nodes but rank 0's.
    """

    def __init__(self, node: NodeSettings, run_dir: Path | None, client: Client) -> None:
        self._node = node
        self._processes_path = (run_dir or node.log_dir) / "processes.json"
        self._client = client
        self._requests: JobRequests | None = None
        if run_dir is not None:
            self._requests = JobRequests(run_dir, node.node_id, node.socket_dir, self._act_on)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._actors: dict[str, SupervisedActor] = {}
        self._loaded_pools: NodePools | None = None
        self._hosted = HostedEngines(self._start)
        self._remote: dict[str, RemoteActor] = {}
        self._links = JobLinks(
            client, self._on_event_elsewhere, self._on_node_lost, self._on_node_left
        )
        self._ranks = AttachedRanks(on_event=self._links.tell)
        self._job_stop = JobStop()
        self._stopped_at: float | None = None  # when a stop signal reached this process
        self._fd_socket = str(node.socket_dir / "fds")
        self._fd_server: FdServer
        self._tasks: asyncio.TaskGroup
        self._actor_tasks: asyncio.TaskGroup
        self._spawned = asyncio.Event()
        self._last_incarnations: dict[str, int] = {}
        self._started_over = asyncio.Event()
        self._started_over.set()
        self.over = asyncio.Event()

    # -- ranks ---------------------------------------------------------------------------

    async def attach(
        self, rank: int, local_world_size: int, pid: int, incarnation: int, may_restart: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A rank's stream of events, open as long as the rank lives: its end is noticed here.

        Events: {"kind": "attached"}, {"kind": "failed", "message"}, {"kind": "note", "text"},
        {"kind": "signal", "number", "grace_s"}, {"kind": "nodes", "nodes"}.
        """
        if incarnation > self._ranks.incarnation:
            self._start_over(incarnation)
        try:
            async with asyncio.timeout(_START_OVER_LIMIT_S):
                await self._started_over.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"actors of the ranks before their restart have not ended within "
                f"{_START_OVER_LIMIT_S:.0f} s; see the supervisor's log"
            ) from None
        me = self._ranks.add(rank, pid)
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
                self._on_rank_gone(me, local_world_size, may_restart)

    def _start_over(self, incarnation: int) -> None:
        """Torchrun has restarted the ranks: the old ranks' actors end, and engines stay warm.

        Their weights are no longer valid, so they wait for a sync of the new ranks.
        """
        logger.info("the ranks were restarted (incarnation %d)", incarnation)
        self._job_stop.withdraw()
        self._stopped_at = None
        for rank in self._ranks.start_over(incarnation):
            self._end_syncs_of(rank)
        if self._started_over.is_set():  # else the actors of an earlier restart are still ending
            self._started_over.clear()
            self._tasks.create_task(self._stop_all_but_engines(), name="start-over")

    async def _stop_all_but_engines(self) -> None:
        others = [actor for actor in self._actors.values() if actor.spec.role != "engine"]
        for actor in others:
            actor.stop()
        try:
            if self._loaded_pools is not None:
                await self._loaded_pools.invalidate()
        except DeadlineExceeded as error:
            self.end("starting over", str(error))
            return
        for actor in others:
            await actor.ended.wait()
            self._forget(actor)
        self._started_over.set()

    def detach(self, rank: int) -> None:
        """Called by a rank before it leaves: its stream of events ends, and its end is expected."""
        self._ranks.detach(rank)

    async def fail_job(self, who: str, message: str) -> None:
        """Called by a rank: the job is lost. Every rank is notified; the first failure counts.

        A rank whose collective broke because another died is often faster than the news of that
        death, so its report waits a moment for it.
        """
        await self._ranks.await_failure(_DEATH_NEWS_LIMIT_S)
        self._ranks.fail(who, message)

    def end(self, who: str, why: str) -> None:
        """Ends the job for a reason outside it; waiting ranks are notified."""
        self._ranks.fail(who, why)
        self.over.set()

    def pass_on_signal(self, rank: int, incarnation: int, number: int) -> None:
        """Called by a rank that got a stop signal, which may have reached it alone."""
        if incarnation == self._ranks.incarnation:
            self._job_stop.request()
        self._ranks.pass_on_signal(f"rank {rank}", incarnation, number)

    def request(self, call: dict[str, Any]) -> None:
        """Called for `umbra stop`, `umbra preempt` and `umbra drain`, with a `JobRequest`.

        Raises:
            ActorNotFound: it is addressed to another job, or that has no such node.
        """
        if self._requests is None:
            raise ActorNotFound("the supervisor of rank 0's node takes requests to the job")
        self._requests.take(from_wire(JobRequest, call))

    def _act_on(self, request: JobRequest) -> None:
        if request.kind == "drain":
            self._links.dismiss(self._links.find_generator(request.node), "")
        else:
            self.stop_job(request.number, request.grace_s)

    def stop_job(self, number: int, grace_s: float | None = None) -> None:
        """Called when a stop signal reached this process, maybe through the guardian.

        The ranks stop as if it had reached them, and the job is over when the last has left. A
        second signal, after a moment, does not wait for them, unless it is a preemption.

        Args:
            grace_s: see `AttachedRanks.pass_on_signal`.
        """
        now = time.monotonic()
        if self._stopped_at is not None and now - self._stopped_at > STOP_WINDOW_S:
            if number == PREEMPT_SIGNAL:
                return
            self.end("the supervisor", "a second signal stopped it before the ranks had left")
            return
        self._job_stop.request()
        self._stopped_at = now if self._stopped_at is None else self._stopped_at
        incarnation = self._ranks.incarnation
        is_new = self._ranks.pass_on_signal("the supervisor", incarnation, number, grace_s)
        if is_new and number == PREEMPT_SIGNAL and self._requests is not None:
            self._requests.mark_preempted()
        if not len(self._ranks):
            self.over.set()

    def note(self, text: str) -> None:
        """Shows one line to the person who runs the job, who looks at rank 0's output."""
        self._ranks.note(text)
        self._links.tell_lead({"kind": "note", "text": text})

    def note_gpu_memory(self, rank: int, allocated_nbytes: int, reserved_nbytes: int) -> None:
        """Called by a rank with the memory that torch has on its GPU; see `gpu_shortage`."""
        memory = RankMemory(allocated_nbytes=allocated_nbytes, reserved_nbytes=reserved_nbytes)
        self._ranks.note_gpu_memory(rank, memory)

    async def _describe_gpu_memory(self) -> str:
        ranks = self._ranks.all()
        roots = {rank.pid: rank.name for rank in ranks}
        roots |= {
            actor.pid: f"{actor.spec.name} (pid {actor.pid})"
            for actor in self._actors.values()
            if actor.has_process
        }
        memory = {rank.name: rank.gpu_memory for rank in ranks if rank.gpu_memory is not None}
        return await read_gpu_memory(roots, memory)

    def _on_rank_gone(self, gone: AttachedRank, local_world_size: int, may_restart: bool) -> None:
        if not self._ranks.has_detached(gone.rank):
            self._end_syncs_of(gone.rank)
            self._ranks.fail(
                f"rank {gone.rank}",
                f"its process (pid {gone.pid}) ended without a report: it was killed (out of "
                "memory?) or crashed; see its last output",
            )
        if len(self._ranks):
            return
        if self._ranks.has_failed:
            is_over = not may_restart
        else:
            is_over = self._ranks.num_detached >= local_world_size
        if is_over or self._stopped_at is not None:
            self.over.set()

    def _end_syncs_of(self, lost_rank: int) -> None:
        for pool in self._all_pools():
            pool.sync.rank_lost(lost_rank)
        self._links.tell_lead({"kind": "rank_lost", "rank": lost_rank})

    # -- other nodes -----------------------------------------------------------------------

    async def join_job(self, nodes: list[dict[str, Any]], node: int, timeout_s: float) -> None:
        """Called by local rank 0: links this supervisor to those of the other nodes.

        Args:
            nodes: all nodes (`JobNode`), in the order of their ranks.
            node: index of this one.

        Raises:
            DeadlineExceeded: another supervisor cannot be reached.
        """
        parsed = [from_wire(JobNode, raw) for raw in nodes]
        await self._links.connect(parsed, node, timeout_s, self._tasks)
        self._ranks.tell_nodes(nodes)

    async def join(self, node: int) -> AsyncGenerator[dict[str, Any], None]:
        """Called by the supervisor of another node; see `LeadLink`."""
        async for event in self._links.join(node):
            yield event

    async def report(self, node: int, event: dict[str, Any]) -> None:
        """Called by the supervisor of another node; see `LeadLink`."""
        await self._links.report(node, event)

    def _on_event_elsewhere(self, node: int, event: dict[str, Any]) -> None:
        match event:
            case {"kind": "failed", "message": str(message)}:
                self._ranks.fail_as(message)
            case {"kind": "signal", "number": int(number), "grace_s": float() | None as grace_s}:
                self._job_stop.request()
                sender = f"a process of node {node}"
                self._ranks.pass_on_signal(sender, self._ranks.incarnation, number, grace_s)
            case {"kind": "rank_lost", "rank": int(rank)}:
                self._end_syncs_of(rank)
            case {"kind": "note", "text": str(text)}:
                self._ranks.note(text)
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

        Args:
            lead: rank 0's node, a `JobNode`.
            me: this one.

        Yields:
            Lines for the person who started that program.

        Raises:
            ConfigError: the job cannot use this node.
            JobFailed: the job or this node's engines have failed, or it cannot be reached.
        """
        try:
            nodes = from_wire(JobNode, lead), from_wire(JobNode, me)
            node = await self._links.generate_for(*nodes, timeout_s, self._tasks)
            yield f"joined as node {node}"
            await first_of(self._links.ended, self._ranks.failed, self.over)
            if failure := self._ranks.failure:
                self._links.tell_lead({"kind": "note", "text": f"node {node}: {failure}"})
                raise JobFailed(failure)
            yield "the job is over" if self._links.ended.is_set() else "left the job, as asked"
        finally:
            self.over.set()

    async def admit(self, node: dict[str, Any]) -> int:
        """Called by the supervisor of a node that only generates; returns its index in the job.

        Raises:
            ConfigError: the job cannot use that node.
        """
        generator = from_wire(JobNode, node)
        self._pools.check_node(generator)
        idx = await self._links.admit(generator)
        engines = self._pools.add_node(idx, generator)
        what = f"starts {', '.join(engines)}" if engines else "waits for the job's pools"
        self.note(f"node {idx} ({generator.node_id}) has joined to generate, and {what}")
        return idx

    def _on_node_left(self, node: int) -> None:
        if self._links.only_generates(node):
            self._remove_generator(node, "has left")

    def _remove_generator(self, node: int, what: str) -> None:
        self._pools.remove_node(node)
        self.note(f"node {node} ({self._links.nodes[node].node_id}), which only generated, {what}")

    def _on_node_lost(self, node: int, why: str) -> None:
        nodes = self._links.nodes
        if self._links.only_generates(node) and self._links.lead is None:
            self._remove_generator(node, f"cannot be reached any more: {why}")
            return
        name = f"node {node} ({nodes[node].node_id})"
        self.end(name, f"it cannot be reached any more: {why}")  # before syncs fail for it
        for rank in ranks_of(nodes, node):
            self._end_syncs_of(rank)

    async def host_engine(self, spec: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Called by the supervisor of another node; see `HostedEngines.host`."""
        async for state in self._hosted.host(from_wire(ActorSpec, spec)):
            yield state

    async def command_hosted(self, command: str, name: str, *arguments: Any) -> None:
        """Called by the supervisor of another node; see `HostedEngines.command`."""
        await self._hosted.command(command, name, *arguments)

    def _start_engine(self, spec: ActorSpec, node: int, may_start: asyncio.Event) -> EngineActor:
        if node == 0:
            return self._start(spec, may_start)
        there = self._links.supervisor_of(node)
        actor = RemoteActor(spec, there, may_start, partial(self._on_remote_change, node))
        self._remote[spec.name] = actor
        self._actor_tasks.create_task(actor.run(), name=f"actor:{spec.name}")
        return actor

    def _on_remote_change(self, node: int, actor: RemoteActor) -> None:
        for pool in self._all_pools():
            pool.on_actor_change(actor)
        if self._links.only_generates(node):
            self._on_generator_change(node, actor)
            return
        is_lost = actor.state == ActorState.FAILED and actor.has_run
        if is_lost and not self._links.has_left(node):
            self._ranks.fail(actor.spec.name, actor.failure)

    def _on_generator_change(self, node: int, actor: RemoteActor) -> None:
        if actor.state not in (ActorState.STOPPED, ActorState.FAILED):
            return
        for pool in self._all_pools():
            pool.remove(actor)
        if actor.state == ActorState.FAILED and not actor.has_run:
            self._links.dismiss(node, actor.failure)

    # -- actors --------------------------------------------------------------------------

    async def spawn(self, spec: dict[str, Any]) -> ActorRef:
        """Starts an actor and waits until it serves.

        Raises:
            ConfigError: the spec is malformed or the name taken.
            ActorDied: it did not start; with its traceback or last log lines.
        """
        parsed = from_wire(ActorSpec, spec)
        actor = self._start(parsed)
        return await actor.wait_running(parsed.start_timeout_s + parsed.grace_s + 5.0)

    def signalled(self, name: str, incarnation: int) -> bool:
        """Called by an actor that got a stop signal; see `SupervisedActor.signalled`."""
        return self._actor(name).signalled(incarnation)

    async def stop(self, name: str, timeout_s: float) -> None:
        """Ends an actor for good and waits until it is reaped."""
        actor = self._actor(name)
        actor.stop()
        async with asyncio.timeout(timeout_s):
            await actor.ended.wait()
        self._forget(actor)

    @idempotent
    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int = 0) -> ActorRef:
        """The live incarnation of an actor; waits for one that is starting, or not spawned yet.

        `lost_incarnation`: the caller has lost its connection to that one, whose end may not have
        been noticed here. The call then waits for its successor.

        Another node asks rank 0's for an actor that it does not have.

        Raises:
            ActorNotFound, ActorDied, DeadlineExceeded.
        """
        if name not in self._actors and self._links.lead is not None:
            arguments = (name, timeout_s, lost_incarnation)
            found: ActorRef = await self._links.lead.call(
                "resolve", *arguments, timeout_s=timeout_s + 0.5
            )
            return found
        deadline = time.monotonic() + timeout_s
        if name in self._remote:
            return await self._remote[name].wait_running(timeout_s)
        if not lost_incarnation:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while name not in self._actors:
                        await self._spawned.wait()
        actor = self._actor(name)
        return await actor.wait_running(deadline - time.monotonic(), lost_incarnation)

    @idempotent
    def list_actors(self) -> list[dict[str, Any]]:
        """Name, role, state, pid, incarnation and restarts of every actor."""
        return [
            {
                "name": actor.spec.name,
                "role": actor.spec.role,
                "state": str(actor.state),
                "pid": actor.pid,
                "incarnation": actor.incarnation,
                "num_restarts": actor.num_restarts,
            }
            for actor in self._actors.values()
        ]

    def _actor(self, name: str) -> SupervisedActor:
        actor = self._actors.get(name)
        if actor is None:
            known = ", ".join(sorted(self._actors)) or "none"
            raise ActorNotFound(
                f"no actor {name!r} on node {self._node.node_id}; there are: {known}"
            )
        return actor

    def _forget(self, actor: SupervisedActor) -> None:
        """Another actor may have its name by now."""
        if self._actors.get(actor.spec.name) is actor:
            del self._actors[actor.spec.name]

    def _start(self, spec: ActorSpec, may_start: asyncio.Event | None = None) -> SupervisedActor:
        if self.over.is_set():  # nobody would stop it
            raise MailboxClosed(f"the job is over: {spec.name!r} is not started")
        known = self._actors.get(spec.name)
        if known is not None and not known.ended.is_set():
            raise ConfigError(f"an actor named {spec.name!r} already exists: choose another name")
        path = self._node.socket_dir / f"{spec.name}.99999.hb"
        if len(os.fsencode(path)) >= MAX_SOCKET_PATH_NBYTES:
            raise ConfigError(f"actor name {spec.name!r} is too long for a socket: {path}")
        actor = SupervisedActor(
            spec,
            self._node,
            self._context,
            self._on_actor_change,
            self.note,
            self._job_stop,
            # A reused name continues its incarnations, or an old reference would match it.
            num_earlier=self._last_incarnations.get(spec.name, 0),
            may_start=may_start,
            describe_gpu_memory=self._describe_gpu_memory,
        )
        self._actors[spec.name] = actor
        self._spawned.set()
        self._spawned = asyncio.Event()
        self._actor_tasks.create_task(actor.run(), name=f"actor:{spec.name}")
        return actor

    def _on_actor_change(self, actor: SupervisedActor) -> None:
        self._last_incarnations[actor.spec.name] = actor.incarnation
        self._write_processes()
        self._hosted.on_actor_change(actor)
        for pool in self._all_pools():
            pool.on_actor_change(actor)
        # A failed first start is the answer to `spawn`, not the job's failure.
        if actor.state == ActorState.FAILED and actor.spec.essential and actor.has_run:
            self._ranks.fail(actor.spec.name, actor.failure)

    def _write_processes(self) -> None:
        """Writes processes.json, which describes the processes for people and scripts."""
        path = self._processes_path
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps({row.pop("name"): row for row in self.list_actors()}))
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("cannot write %s: %s", path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    # -- pools ---------------------------------------------------------------------------

    async def create_pool(self, spec: dict[str, Any]) -> None:
        """Starts the engines of a pool and waits until each is ready.

        Creating the same pool again (after an elastic restart) returns the one whose engines are
        warm.

        Raises:
            ConfigError, ActorDied.
        """
        await self._pools.create(spec)

    @property
    def _pools(self) -> NodePools:
        """Loaded with the first pool, because that takes 40 ms."""
        if self._loaded_pools is None:
            from umbra.runtime.pools.node_pools import NodePools

            self._loaded_pools = NodePools(
                self._start_engine,
                self._client,
                self._ranks.note,
                self._tasks,
                self._fd_server,
                self._fd_socket,
            )
        return self._loaded_pools

    def _all_pools(self) -> list[EnginePool]:
        return [] if self._loaded_pools is None else self._loaded_pools.all()

    async def watch_pool(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the states of a pool's engines: all of them, then every change (see
        `EnginePool`)."""
        async for event in self._pools[name].watch():
            yield event

    @idempotent
    def pool_states(self, name: str) -> list[dict[str, Any]]:
        return self._pools[name].states()

    @idempotent
    def catch_up(self, name: str) -> dict[str, Any]:
        """Which engines wait for which version; called for ranks that wait for a batch.

        Returns:
            {"version": int | None, "engines": [[name, incarnation], ...], "ranks": [rank, ...]};
            `ranks` already publish that version again, and wait for the others to join.
        """
        return self._pools[name].catch_up()

    @idempotent
    def pool_has_work(self, name: str, has_work: bool) -> None:
        """Whether a pool has requests to answer; its dispatcher reports it.

        It decides the turns of pools that share memory; see `umbra.runtime.pools.time_slicing`.
        """
        self._pools.report_work(name, has_work)

    async def pool_pause(self, name: str, mode: str, timeout_s: float) -> None:
        await self._pools.pause(name, mode, timeout_s)

    async def pool_resume(self, name: str, timeout_s: float) -> None:
        await self._pools.resume(name, timeout_s)

    async def pool_sleep(self, name: str, level: SleepLevel, timeout_s: float) -> None:
        await self._pools.sleep(name, level, timeout_s)

    async def pool_wake(self, name: str, tags: list[Tag], timeout_s: float) -> None:
        await self._pools.wake(name, tags, timeout_s)

    # -- weight syncs: see `umbra.runtime.weights.sync_calls` --------------------------------------

    async def sync_begin(self, call: dict[str, Any]) -> dict[str, Any]:
        return await self._pools.sync_begin(call)

    def sync_progress(self, call: dict[str, Any]) -> dict[str, Any]:
        return self._pools.sync_progress(call)

    async def sync_filled(self, call: dict[str, Any]) -> None:
        await self._pools.sync_filled(call)

    async def sync_end(self, call: dict[str, Any]) -> dict[str, Any]:
        return await self._pools.sync_end(call)

    def sync_abort(self, call: dict[str, Any]) -> None:
        self._pools.sync_abort(call)

    # -- lifetime ------------------------------------------------------------------------

    async def run(self, tcp_endpoint: str = "", secret_file: str = "") -> None:
        """Runs until the job is over; then ends every actor and returns.

        Args:
            tcp_endpoint: at which other nodes reach this supervisor; "" for none.
            secret_file: path of the job's keys; "" for none.
        """
        try:
            requests = self._requests
            posted = None if requests is None else requests.posted(tcp_endpoint, secret_file)
            with posted or contextlib.nullcontext():
                await self._run_actors()
        finally:
            self._context.destroy(linger=0)

    async def _run_actors(self) -> None:
        async with (
            serve_fds(self._fd_socket) as self._fd_server,
            asyncio.TaskGroup() as self._tasks,
        ):
            async with asyncio.TaskGroup() as self._actor_tasks:
                await self._until_over()
                logger.info("the job is over: stopping %d actors", len(self._actors))
                for actor in (*self._actors.values(), *self._remote.values()):
                    actor.stop()
            if self._loaded_pools is not None:
                self._loaded_pools.close()
            await self._links.leave()

    async def _until_over(self) -> None:
        if self._requests is None:
            await self.over.wait()
            return
        looking = self._tasks.create_task(self._requests.look())
        await self.over.wait()
        looking.cancel()
