from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.remote_actor import ActorProcess, HostedActors, RemoteActor
from umbra.runtime.actor.supervised_actor import SupervisedActor
from umbra.runtime.cluster.gpu_shortage import read_gpu_memory
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.socket_dir import MAX_SOCKET_PATH_NBYTES
from umbra.runtime.disk import replacing
from umbra.runtime.errors import (
    ActorDied,
    ActorNotFound,
    ConfigError,
    DeadlineExceeded,
    MailboxClosed,
)
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import from_wire

logger = logging.getLogger(__name__)


class ActorWatcher(Protocol):
    """The supervisor, as its actors see it."""

    def on_actor_change(self, actor: SupervisedActor) -> None: ...

    def on_remote_change(self, node: int, actor: RemoteActor) -> None: ...

    async def explain_late(self, why: str) -> str:
        """Text for the error of an actor whose first start is late, before it is killed."""
        ...


class NodeActors:
    """The actors of this node, and the actors on other nodes that this supervisor asked for. Owned
    by the supervisor. No actor starts once the job is over. `take_warm` returns an engine that no
    pool uses."""

    def __init__(
        self,
        context: NodeContext,
        watcher: ActorWatcher,
        processes_path: Path,
        take_warm: Callable[[str, asyncio.Event], SupervisedActor | None],
    ) -> None:
        self.hosted = HostedActors(self.start, context.rules)
        self._context = context
        self._node = context.node
        self._watcher = watcher
        self._processes_path = processes_path
        self._take_warm = take_warm
        self._own: dict[str, SupervisedActor] = {}
        self._remote: dict[str, RemoteActor] = {}
        self._following: dict[str, asyncio.Task[None]] = {}  # tasks of `_remote`
        self._last_incarnations: dict[str, int] = {}
        self._spawned = asyncio.Event()  # set, and replaced, by each start
        self._changed = asyncio.Event()  # since `_processes_path` was last written
        self._have_ended = False
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Actors may be started within the block. All have ended after it."""
        async with asyncio.TaskGroup() as writing:
            writing.create_task(self._write_changes(), name="processes")
            async with asyncio.TaskGroup() as self._tasks:
                yield
                logger.info("the job is over: stopping %d actors", len(self._own))
                for actor in (*self._own.values(), *self._remote.values()):
                    actor.stop()
            self._have_ended = True
            self._changed.set()

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def own(self) -> Collection[SupervisedActor]:
        return self._own.values()

    def find(self, name: str) -> ActorProcess:
        actor = self._own.get(name) or self._remote.get(name)
        if actor is None:
            known = ", ".join(sorted({*self._own, *self._remote})) or "none"
            raise ActorNotFound(
                f"no actor {name!r} on node {self._node.node_id}; there are: {known}"
            )
        return actor

    def start(self, spec: ActorSpec, may_start: asyncio.Event | None = None) -> SupervisedActor:
        """Starts an actor on this node; its processes wait for `may_start`. Raises ConfigError for
        its name, MailboxClosed when the job is over."""
        if may_start is not None and (warm := self._take_warm(spec.name, may_start)):
            return warm
        self._check_may_start(spec)
        path = self._node.socket_dir / f"{spec.name}.99999.hb"
        if len(os.fsencode(path)) >= MAX_SOCKET_PATH_NBYTES:
            raise ConfigError(f"actor name {spec.name!r} is too long for a socket: {path}")
        actor = SupervisedActor(
            spec,
            self._context,
            self._note_change,
            # A reused name continues its incarnations, or an old reference would match it.
            num_earlier=self._last_incarnations.get(spec.name, 0),
            may_start=may_start,
            describe_gpu_memory=self._describe_gpu_memory,
            explain_late=self._watcher.explain_late,
        )
        self._own[spec.name] = actor
        self._announce()
        self._tasks.create_task(actor.run(), name=f"actor:{spec.name}")
        return actor

    def start_on(self, spec: ActorSpec, node: int, may_start: asyncio.Event) -> ActorProcess:
        if node == 0:
            return self.start(spec, may_start)
        there, epoch = self._context.links.supervisor_of(node), self._context.links.epoch
        self._check_may_start(spec)
        actor = RemoteActor(
            spec, there, epoch, may_start, partial(self._watcher.on_remote_change, node)
        )
        self._remote[spec.name] = actor
        self._announce()
        following = self._tasks.create_task(actor.run(), name=f"actor:{spec.name}")
        self._following[spec.name] = following
        return actor

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int) -> ActorRef:
        deadline = time.monotonic() + timeout_s
        if not lost_incarnation:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while name not in self._own and name not in self._remote:
                        await self._spawned.wait()
        return await self.find(name).wait_running(deadline - time.monotonic(), lost_incarnation)

    async def stop(self, name: str, timeout_s: float) -> None:
        """Ends an actor, waits until it is reaped, and frees its name."""
        actor = self.find(name)
        actor.stop()
        try:
            async with asyncio.timeout(timeout_s):
                await actor.ended.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{name} has not ended within {timeout_s:.3g} s") from None
        if actor.has_process:
            raise ActorDied(actor.failure)
        self.forget(actor)

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "name": actor.spec.name,
                "role": actor.spec.role,
                "state": str(actor.state),
                "pid": actor.pid,
                "incarnation": actor.incarnation,
                "num_restarts": actor.num_restarts,
            }
            for actor in self._own.values()
        ]

    def forget(self, actor: ActorProcess) -> None:
        """Frees the name of an actor that has ended, unless another one has it by now."""
        for known in (self._own, self._remote):
            if known.get(actor.spec.name) is actor:
                del known[actor.spec.name]

    async def leave_remote(self) -> None:
        """Leaves the actors on other nodes to the supervisors there."""
        for task in self._following.values():
            task.cancel()
        if self._following:
            await asyncio.wait(self._following.values())
        self._following.clear()
        self._remote.clear()

    async def _describe_gpu_memory(self) -> str:
        roots = {rank.pid: rank.name for rank in self._context.ranks.all()}
        roots |= {
            actor.pid: f"{actor.spec.name} (pid {actor.pid})"
            for actor in self.own()
            if actor.has_process
        }
        return await read_gpu_memory(roots)

    def _check_may_start(self, spec: ActorSpec) -> None:
        if self._context.over.is_set():
            raise MailboxClosed(f"the job is over: {spec.name!r} is not started")
        for known in (self._own.get(spec.name), self._remote.get(spec.name)):
            if known is not None and not known.ended.is_set():
                raise ConfigError(
                    f"an actor named {spec.name!r} already exists: choose another name"
                )

    def _announce(self) -> None:
        self._spawned.set()
        self._spawned = asyncio.Event()

    def _note_change(self, actor: SupervisedActor) -> None:
        self._last_incarnations[actor.spec.name] = actor.incarnation
        self._changed.set()
        self.hosted.on_actor_change(actor)
        self._watcher.on_actor_change(actor)

    async def _write_changes(self) -> None:
        """Writes the state of all actors, in a thread, because shared file systems may hang."""
        is_last = False
        while not is_last:
            await self._changed.wait()
            self._changed.clear()
            is_last = self._have_ended
            text = json.dumps({row.pop("name"): row for row in self.describe()})
            await asyncio.to_thread(self._write_processes, text)

    def _write_processes(self, text: str) -> None:
        try:
            with replacing(self._processes_path) as file:
                file.write(text.encode())
        except OSError as error:
            logger.warning("cannot write %s: %s", self._processes_path, error)


class ActorCalls:
    """The supervisor's calls about actors, for ranks, actors and other supervisors. Raises
    ConfigError where a pool forbids a stop or restart."""

    def __init__(
        self,
        actors: NodeActors,
        links: JobLinks,
        check_may_stop: Callable[[str], None],
        check_may_restart: Callable[[str], None],
    ) -> None:
        self._actors = actors
        self._links = links
        self._check_may_stop = check_may_stop
        self._check_may_restart = check_may_restart

    async def spawn(self, spec: dict[str, Any], node: int | None = None) -> ActorRef:
        """Starts an actor here or, on rank 0's supervisor, on node `node`; waits until it serves.
        Raises ConfigError if that is impossible, ActorDied with its traceback or last log lines."""
        parsed = from_wire(ActorSpec, spec)
        if node:
            may_start = asyncio.Event()
            may_start.set()
            actor = self._actors.start_on(parsed, node, may_start)
        else:
            actor = self._actors.start(parsed)
        try:
            return await actor.wait_running(parsed.start_timeout_s + parsed.grace_s + 5.0)
        except ActorDied as error:
            if not node:
                raise
            raise ActorDied(f"node {node} ({self._links.nodes[node].node_id}): {error}") from None

    def signalled(self, name: str, incarnation: int) -> bool:
        actor = self._actors.find(name)
        return isinstance(actor, SupervisedActor) and actor.signalled(incarnation)

    async def stop(self, name: str, timeout_s: float) -> None:
        if lead := self._lead_that_has(name):
            await lead.call("stop", name, timeout_s, timeout_s=timeout_s + 0.5)
            return
        self._check_may_stop(name)
        await self._actors.stop(name, timeout_s)

    async def restart(self, name: str, timeout_s: float) -> ActorRef:
        if lead := self._lead_that_has(name):
            found: ActorRef = await lead.call("restart", name, timeout_s, timeout_s=timeout_s + 0.5)
            return found
        self._check_may_restart(name)
        return await self._actors.find(name).restart(timeout_s)

    def _lead_that_has(self, name: str) -> Handle | None:
        is_own = name in self._actors and name not in self._actors.hosted
        return None if is_own else self._links.lead

    @idempotent
    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int = 0) -> ActorRef:
        """The live incarnation of an actor; waits for one that is starting, or not spawned yet. A
        caller that lost its connection passes `lost_incarnation`, whose end may not have been
        noticed here, and gets its successor. Other nodes' actors are resolved by the lead."""
        lead = self._links.lead
        if name not in self._actors and lead is not None:
            arguments = (name, timeout_s, lost_incarnation)
            found: ActorRef = await lead.call("resolve", *arguments, timeout_s=timeout_s + 0.5)
            return found
        return await self._actors.resolve(name, timeout_s, lost_incarnation)

    @idempotent
    def list_actors(self) -> list[dict[str, Any]]:
        return self._actors.describe()

    async def host_actor(
        self, epoch: int, spec: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        await self._links.check_epoch(epoch)
        async for state in self._actors.hosted.host(from_wire(ActorSpec, spec)):
            yield state

    async def command_hosted(
        self, epoch: int, command: str, name: str, *arguments: Any
    ) -> ActorRef | None:
        await self._links.check_epoch(epoch)
        return await self._actors.hosted.command(command, name, *arguments)
