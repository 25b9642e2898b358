from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.node_actors import NodeActors
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.remote_actor import RemoteActor
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.cluster.socket_dir import FD_SOCKET
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.warm_engines import WarmEngines
from umbra.runtime.settings import from_wire, to_wire
from umbra.runtime.weights.image.fd_server import FdServer, serve_fds

if TYPE_CHECKING:
    from umbra.runtime.pools.engine_pool import EnginePool
    from umbra.runtime.pools.node_pools import NodePools
    from umbra.runtime.weights.image.node_images import NodeImages

# Time for another node to end engines that no pool uses: their grace, and the reaping.
_END_WARM_LIMIT_S: Final = 60.0


class JobPools:
    """The pools of a job in one epoch after the other. Owned by the supervisor. Only the lead has
    pools; other nodes hold images and warm engines, left by the last epoch's pools, for them."""

    def __init__(self, context: NodeContext, actors: NodeActors, warm: WarmEngines) -> None:
        self._context = context
        self._node = context.node
        self._links = context.links
        self._actors = actors
        self._warm = warm
        self._loaded: NodePools | None = None
        self._loaded_images: NodeImages | None = None
        self._fd_server: FdServer
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        socket_path = str(self._node.socket_dir / FD_SOCKET)
        async with serve_fds(socket_path) as self._fd_server, asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                self._free_images()

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()

    @property
    def current(self) -> NodePools:
        """The pools of this epoch. Loaded with the first pool, because that takes 40 ms."""
        if self._loaded is None:
            from umbra.runtime.pools.job_images import JobImages
            from umbra.runtime.pools.node_pools import NodePools

            self._loaded = NodePools(
                self._actors.start_on,
                self._context.client,
                self._context.note,
                self._context.record,
                self._tasks,
                self._fd_server,
                JobImages(self.images, self._node.node_id, self._links),
                self._warm_specs,
                self._end_warm,
            )
        return self._loaded

    @property
    def images(self) -> NodeImages:
        """The images of this node. Loaded with the first pool, or for another node's."""
        if self._loaded_images is None:
            from umbra.runtime.weights.image.node_images import NodeImages

            self._loaded_images = NodeImages(self._fd_server)
        return self._loaded_images

    def all(self) -> list[EnginePool]:
        return [] if self._loaded is None else self._loaded.all()

    def rank_lost(self, rank: int) -> None:
        """Ends the syncs that a rank takes part in, on the lead too."""
        for pool in self.all():
            pool.sync.rank_lost(rank)
        self._links.tell_lead({"kind": "rank_lost", "rank": rank})

    async def keep_warm(self) -> list[dict[str, Any]]:
        """Brings engines of the last epoch to rest, for the next one's pools; returns their
        `ActorSpec`s."""
        if self._context.rules.has_epochs:
            await self._warm.keep(self._actors.own())
        return [to_wire(spec) for spec in self._warm.specs()]

    def check_may_stop(self, actor: str) -> None:
        for pool in self.all():
            if pool.find_engine(actor) is not None:
                raise ConfigError(
                    f"{actor} belongs to pool {pool.spec.name!r}, which keeps its engines running "
                    "until the job ends: restart it, or create the pool with a smaller count"
                )

    def check_may_restart(self, actor: str) -> None:
        for pool in self.all():
            engine = pool.find_engine(actor)
            if engine is not None and engine.name != actor:
                raise ConfigError(
                    f"{actor} is a part of engine {engine.name}: restart {engine.name}"
                )

    def stop_others(self) -> list[SupervisedActor]:
        """Stops all actors of this node, except engines that restarted ranks can use."""
        others = [
            each for each in self._actors.own() if not self._context.rules.outlives_ranks(each)
        ]
        for actor in others:
            actor.stop()
        return others

    async def start_over(self) -> None:
        """Called when the ranks were started again. Their weights are no longer valid: engines wait
        for a sync of the new ranks. Returns when all other actors have ended; DeadlineExceeded if
        pools do not settle."""
        others = self.stop_others()
        if self._context.rules.has_epochs:
            await self._dissolve()
        elif self._loaded is not None:
            await self._loaded.invalidate()
        for actor in others:
            await actor.ended.wait()
            self._actors.forget(actor)

    async def _dissolve(self) -> None:
        pools, self._loaded = self._loaded, None
        if pools is not None:
            await pools.dissolve()
        await self._actors.leave_remote()
        self._free_images()

    def _free_images(self) -> None:
        if self._loaded_images is not None:
            self._loaded_images.close()

    async def admit_generator(self, node: JobNode) -> int:
        """Takes in a node that only generates, starts engines there, and returns its index. Raises
        ConfigError if the job cannot use it."""
        self.current.check_node(node)
        idx = await self._links.admit(node)
        engines = self.current.add_node(idx, node)
        what = f"starts {', '.join(engines)}" if engines else "waits for the job's pools"
        text = f"node {idx} ({node.node_id}) has joined to generate, and {what}"
        self._context.note(text, "joined", node.node_id)
        return idx

    def remove_generator(self, node: int, what: str, kind: EventKind) -> None:
        self.current.remove_node(node)
        node_id = self._links.nodes[node].node_id
        self._context.note(f"node {node} ({node_id}), which only generated, {what}", kind, node_id)

    def on_generator_change(self, node: int, actor: RemoteActor) -> None:
        """The node leaves if its engine cannot start."""
        if actor.state not in (ActorState.STOPPED, ActorState.FAILED):
            return
        for pool in self.all():
            pool.remove(actor)
        if actor.state == ActorState.FAILED and not actor.has_run and actor.spec.role == "engine":
            self._links.dismiss(node, actor.failure)

    def _warm_specs(self) -> dict[int, list[ActorSpec]]:
        """Engines that pools of the last epoch have left, by node. Lead only."""
        elsewhere = self._links.warm_elsewhere().items()
        there = {idx: [from_wire(ActorSpec, spec) for spec in specs] for idx, specs in elsewhere}
        return {0: self._warm.specs(), **there}

    async def _end_warm(self, node: int, names: Sequence[str]) -> None:
        if node == 0:
            await self.end_own_warm(names)
            return
        there, epoch = self._links.supervisor_of(node), self._links.epoch
        await there.call("end_warm", epoch, list(names), timeout_s=_END_WARM_LIMIT_S)

    async def end_own_warm(self, names: Sequence[str]) -> None:
        """Ends engines of this node that no pool uses; returns when their processes have ended."""
        for actor in self._warm.end(names):
            await actor.ended.wait()
            self._actors.forget(actor)
