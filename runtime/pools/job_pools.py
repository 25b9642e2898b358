from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.node_actors import NodeActors
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.remote_actor import RemoteActor
from umbra.runtime.actor.supervised_actor import ActorState, SupervisedActor
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.cluster.socket_dir import FD_SOCKET
from umbra.runtime.errors import ActorNotFound, ConfigError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.pools.warm_engines import WarmEngines, reuse_engines
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.settings import from_wire, to_wire
from umbra.runtime.weights.image.fd_server import FdServer, serve_fds

if TYPE_CHECKING:
    from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag
    from umbra.runtime.pools.engine_pool import EnginePool
    from umbra.runtime.pools.pool_slicing import PoolSlicing
    from umbra.runtime.weights.image.image_memory import ImageOrder, NodeImages

# Time for another node to end engines that no pool uses: their grace, and the reaping.
_END_WARM_LIMIT_S: Final = 60.0
_INVALIDATE_LIMIT_S: Final = 60.0


class JobPools:
    """The pools of a job in one epoch after the other: creates them, finds them by name, and
    time-slices those that share memory. Owned by the supervisor. Only the lead has pools; other
    nodes hold images and warm engines, left by the last epoch's pools, for them. Modules of pools
    are loaded with the first pool, because that takes 40 ms."""

    def __init__(self, context: NodeContext, actors: NodeActors, warm: WarmEngines) -> None:
        self._context = context
        self._node = context.node
        self._links = context.links
        self._actors = actors
        self._warm = warm
        self._begin_epoch()
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
        for task in self._background:
            task.cancel()

    def _begin_epoch(self) -> None:
        """The last epoch's pools, which calls of its ranks may still use, are not seen any more."""
        self._pools: dict[str, EnginePool] = {}
        self._slicings: dict[str, PoolSlicing] = {}  # by the host's name
        self._hosts: dict[str, str] = {}  # by the guest's name
        self._background: set[asyncio.Task[None]] = set()
        self._creations: dict[str, asyncio.Lock] = {}  # by the pool's name
        self._generators: dict[int, JobNode] = {}  # nodes that only generate, by index

    @property
    def images(self) -> NodeImages:
        """The images of this node. Loaded with the first pool, or for another node's."""
        if self._loaded_images is None:
            from umbra.runtime.weights.image.image_memory import NodeImages

            self._loaded_images = NodeImages(self._fd_server)
        return self._loaded_images

    def all(self) -> list[EnginePool]:
        return list(self._pools.values())

    def rank_lost(self, rank: int) -> None:
        """Ends the syncs that a rank takes part in, on the lead too."""
        for pool in self.all():
            pool.sync.rank_lost(rank, self._links.node_of_rank(rank))
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
        else:
            await self._invalidate()
        for actor in others:
            await actor.ended.wait()
            self._actors.forget(actor)

    async def _dissolve(self) -> None:
        """Ends all pools and leaves their engines running. Open syncs fail at their ranks."""
        pools, background = self.all(), self._background
        self.close()
        self._begin_epoch()
        if background:
            await asyncio.wait(background)
        for pool in pools:
            await pool.close()
        await self._actors.leave_remote()
        self._free_images()

    def _free_images(self) -> None:
        if self._loaded_images is not None:
            self._loaded_images.close()

    async def admit_generator(self, node: JobNode) -> int:
        """Takes in a node that only generates, starts engines there, and returns its index. Raises
        ConfigError if the job cannot use it."""
        for pool in self._pools_of_trainer():
            pool.spec.engine_specs_on(node.gpus, first_idx=0)
        idx = await self._links.admit(node)
        self._generators[idx] = node
        engines = [
            name for pool in self._pools_of_trainer() for name in self._extend(pool, idx, node)
        ]
        what = f"starts {', '.join(engines)}" if engines else "waits for the job's pools"
        text = f"node {idx} ({node.node_id}) has joined to generate, and {what}"
        self._context.note(text, "joined", node.node_id)
        return idx

    def remove_generator(self, node: int, what: str, kind: EventKind) -> None:
        """Called when the node has left or is lost; later pools do not use it. Its engines end."""
        self._generators.pop(node, None)
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

    def __getitem__(self, name: str) -> EnginePool:
        pool = self._pools.get(name)
        if pool is None:
            known = ", ".join(sorted(self._pools)) or "none"
            raise ActorNotFound(f"no pool {name!r}; there are: {known}")
        return pool

    async def create(self, call: dict[str, Any]) -> None:
        """Starts the engines of a pool, a `PoolSpec`, and waits until each is ready. An equal pool
        (after an elastic restart) is kept with its warm engines. A pool that is still being
        created, or ended because its rank died, is waited for."""
        spec = from_wire(PoolSpec, call)
        async with self._creations.setdefault(spec.name, asyncio.Lock()):
            await self._create(spec)

    async def _create(self, spec: PoolSpec) -> None:
        known = self._pools.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise ConfigError(f"a pool named {spec.name!r} already exists with other settings")
            return
        from umbra.runtime.pools.engine_pool import EnginePool

        pool = self._pools[spec.name] = EnginePool(
            spec,
            self._context,
            self._tasks,
            self._fd_server,
            JobImages(self.images, self._node.node_id, self._links),
        )
        sync: asyncio.Task[None] | None = None
        if not spec.load_weights:
            sync = self._run_in_background(pool.sync.run())
        try:
            async with self._joining(pool):
                await self._start_engines(pool)
        except BaseException:
            if self._pools.get(spec.name) is pool:  # else it belongs to an epoch that is over
                del self._pools[spec.name]
                self._hosts.pop(spec.name, None)
            if sync is not None:
                self._background.discard(sync)
                sync.cancel()
            raise
        if not spec.load_weights:
            for idx, node in self._generators.items():
                self._extend(pool, idx, node)

    def _pools_of_trainer(self) -> list[EnginePool]:
        return [pool for pool in self._pools.values() if not pool.spec.load_weights]

    def _extend(self, pool: EnginePool, idx: int, node: JobNode) -> list[str]:
        specs = pool.spec.engine_specs_on(node.gpus, first_idx=pool.next_idx)
        for spec in specs:
            pool.add(self._actors.start_on(spec, idx, pool.may_start))
        return [spec.name for spec in specs]

    async def _start_engines(self, pool: EnginePool) -> None:
        try:
            nodes = pool.spec.nodes
            specs, unused = reuse_engines(
                pool.spec.name, pool.spec.engine_specs(), nodes, self._warm_specs()
            )
            for node, names in unused.items():
                await self._end_warm(node, names)
            for idx, (spec, node) in enumerate(zip(specs, nodes, strict=True)):
                pool.add(self._actors.start_on(spec, node, pool.may_start))
                for follower, there in pool.spec.follower_specs(idx):
                    pool.add_follower(
                        spec.name, self._actors.start_on(follower, there, pool.may_start)
                    )
            await pool.wait_running()
        except BaseException:
            with contextlib.suppress(TimeoutError):  # the first error is the one to raise
                await pool.end()  # before another pool gets their memory
            raise

    @asynccontextmanager
    async def _joining(self, pool: EnginePool) -> AsyncGenerator[None]:
        host = pool.spec.shares_with or pool.spec.name
        if pool.spec.shares_with:
            self._hosts[pool.spec.name] = host
            if host not in self._slicings:
                from umbra.runtime.pools.pool_slicing import PoolSlicing

                slicing = self._slicings[host] = PoolSlicing(host)
                self._run_in_background(slicing.run())
                if host in self._pools and self._pools[host].engines:
                    slicing.take_host(self._pools[host])
        slicing = self._slicings.get(host)
        if slicing is None:
            yield
        else:
            async with slicing.joining(pool):
                yield

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._background.add(task)
        return task

    def slicing_of(self, host: str) -> PoolSlicing | None:
        return self._slicings.get(host)

    def report_work(self, name: str, has_work: bool) -> None:
        self[name]  # raises if there is no such pool
        slicing = self._slicings.get(self._hosts.get(name, name))
        if slicing is not None:
            slicing.report(name, has_work)

    async def _invalidate(self) -> None:
        """Called when the trainer that made the weights was restarted."""
        for name, pool in list(self._pools.items()):
            if pool.spec.load_weights:
                continue
            async with self.reserved_for_trainer(name, _INVALIDATE_LIMIT_S):
                await pool.invalidate()
        for slicing in self._slicings.values():
            slicing.forget_work()

    def reserved_for_trainer(
        self, name: str, timeout_s: float, *, sleeps: bool | None = None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        if name in self._hosts:
            raise ConfigError(
                f"pool {name!r} shares memory with {self._hosts[name]!r}, so umbra wakes it and "
                "puts it to sleep; do not call wake or sleep on it"
            )
        slicing = self._slicings.get(name)
        if slicing is None:
            return contextlib.nullcontext()
        return slicing.reserved_for_trainer(timeout_s, sleeps=sleeps)


class JobImages:
    """The images of weights on all nodes of a job, as an `ImageHolder` for the lead."""

    def __init__(self, own: NodeImages, own_node: str, links: JobLinks) -> None:
        self._own = own
        self._own_node = own_node
        self._links = links

    @asynccontextmanager
    async def hold(
        self, node_id: str, order: ImageOrder
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        if node_id == self._own_node:
            async with aclosing(self._own.hold(order)) as states:
                yield states
            return
        # No deadline per item: while nothing changes there, nothing is reported. Its link notices
        # the loss of the node and drops the connection.
        there = self._links.supervisor_at(node_id)
        arguments = self._links.epoch, to_wire(order)
        async with there.stream("hold_image", *arguments, timeout_s=None) as states:
            yield states


class PoolCalls:
    """The supervisor's calls about pools, for ranks, dispatchers and other supervisors."""

    def __init__(self, pools: JobPools, links: JobLinks) -> None:
        self._pools = pools
        self._links = links

    async def create_pool(self, spec: dict[str, Any]) -> None:
        """Starts the engines of a pool and waits until each is ready; an equal pool (after an
        elastic restart) is kept. Raises ConfigError or ActorDied."""
        await self._pools.create(spec)

    async def watch_pool(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        async for event in self._pools[name].watch():
            yield event

    @idempotent
    def pool_states(self, name: str) -> list[dict[str, Any]]:
        return self._pools[name].states()

    @idempotent
    def catch_up(self, name: str) -> dict[str, Any]:
        """The engines that wait for a version, for ranks that wait for a batch.

        Returns:
            {"version": int | None, "engines": [[name, incarnation], ...], "ranks": [rank,
                ...]}; `ranks` already publish that version again, and wait for the others to join.
        """
        return self._pools[name].catch_up()

    @idempotent
    def pool_has_work(self, name: str, has_work: bool) -> None:
        """Takes a dispatcher's report of requests to answer, which decides the turns of pools."""
        self._pools.report_work(name, has_work)

    async def pool_pause(self, name: str, mode: str, timeout_s: float) -> None:
        async with self._pools.reserved_for_trainer(name, timeout_s):
            await self._pools[name].pause(mode, timeout_s)

    async def pool_resume(self, name: str, timeout_s: float) -> None:
        async with self._pools.reserved_for_trainer(name, timeout_s):
            await self._pools[name].resume(timeout_s)

    async def pool_sleep(
        self, name: str, level: SleepLevel, tags: list[Tag], timeout_s: float
    ) -> None:
        async with self._pools.reserved_for_trainer(name, timeout_s, sleeps=True):
            await self._pools[name].sleep(level, tags, timeout_s)

    async def pool_wake(self, name: str, tags: list[Tag], timeout_s: float) -> None:
        async with self._pools.reserved_for_trainer(name, timeout_s, sleeps=False):
            await self._pools[name].wake(tags, timeout_s)

    async def sync(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answers a rank's message of a weight sync; see `sync_messages`. A sync claims the memory
        of pools that share it with this one."""
        from umbra.runtime.weights.sync_messages import SyncBegin, decode_call, encode

        call = decode_call(message)
        pool, slicing = self._pools[call.pool], self._pools.slicing_of(call.pool)
        async with contextlib.AsyncExitStack() as beginning:
            if isinstance(call, SyncBegin):
                if slicing is not None:
                    await beginning.enter_async_context(slicing.sync_begins(call.left_s))
                await beginning.enter_async_context(pool.sync_begins(call))
            return encode(await pool.sync.answer(call))

    async def admit(self, node: dict[str, Any]) -> dict[str, int]:
        """Called by a supervisor that only generates; returns {"node": its index, "epoch"}."""
        idx = await self._pools.admit_generator(from_wire(JobNode, node))
        return {"node": idx, "epoch": self._links.epoch}

    async def hold_image(
        self, epoch: int, order: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        from umbra.runtime.weights.image.image_memory import ImageOrder

        await self._links.check_epoch(epoch)
        held = self._pools.images.hold(from_wire(ImageOrder, order))
        async with contextlib.aclosing(held) as states:
            async for state in states:
                yield state

    async def end_warm(self, epoch: int, names: list[str]) -> None:
        """Called by the lead; returns when the engines' processes have ended."""
        await self._links.check_epoch(epoch)
        await self._pools.end_own_warm(names)
