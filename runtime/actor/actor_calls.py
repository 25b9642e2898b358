from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.node_actors import NodeActors
from umbra.runtime.actor.supervised_actor import SupervisedActor
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.errors import ActorDied
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.settings import from_wire


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
