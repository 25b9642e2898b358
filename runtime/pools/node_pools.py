from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.remote_actor import ActorProcess
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.run_events import Notify
from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag
from umbra.runtime.errors import ActorNotFound, ConfigError
from umbra.runtime.pools.engine_pool import EnginePool
from umbra.runtime.pools.pool_slicing import PoolSlicing
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.pools.warm_engines import WarmSpecs, reuse_engines
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.settings import from_wire
from umbra.runtime.weights.image.fd_server import FdServer
from umbra.runtime.weights.links.link_plan import ImageHolder
from umbra.runtime.weights.sync_messages import SyncBegin, decode_call, encode

_INVALIDATE_LIMIT_S: Final = 60.0

StartEngine = Callable[[ActorSpec, int, asyncio.Event], ActorProcess]


class NodePools:
    """Creates pools, finds them by name, and time-slices pools that share memory. Owned by the
    supervisor. Calls take the wire's plain values. `start` starts an engine on the node of that
    index once its event is set; `warm` and `end_warm` are for engines that the last epoch's
    pools have left."""

    def __init__(
        self,
        start: StartEngine,
        client: Client,
        note: Notify,
        record: Notify,
        tasks: asyncio.TaskGroup,
        fd_server: FdServer,
        images: ImageHolder,
        warm: Callable[[], WarmSpecs],
        end_warm: Callable[[int, Sequence[str]], Awaitable[None]],
    ) -> None:
        self._start = start
        self._warm = warm
        self._end_warm = end_warm
        self._client = client
        self._note = note
        self._record = record
        self._tasks = tasks
        self._fd_server = fd_server
        self._images = images
        self._pools: dict[str, EnginePool] = {}
        self._slicings: dict[str, PoolSlicing] = {}  # by the host's name
        self._hosts: dict[str, str] = {}  # by the guest's name
        self._background: list[asyncio.Task[None]] = []
        self._creations: dict[str, asyncio.Lock] = {}  # by the pool's name
        self._generators: dict[int, JobNode] = {}  # nodes that only generate, by index

    def __getitem__(self, name: str) -> EnginePool:
        pool = self._pools.get(name)
        if pool is None:
            known = ", ".join(sorted(self._pools)) or "none"
            raise ActorNotFound(f"no pool {name!r}; there are: {known}")
        return pool

    def all(self) -> list[EnginePool]:
        return list(self._pools.values())

    def close(self) -> None:
        for task in self._background:
            task.cancel()

    async def dissolve(self) -> None:
        """Ends all pools and leaves their engines running. Open syncs fail at their ranks."""
        self.close()
        if self._background:
            await asyncio.wait(self._background)
        for pool in self._pools.values():
            await pool.close()

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
        pool = self._pools[spec.name] = EnginePool(
            spec,
            self._client,
            self._note,
            self._record,
            self._tasks,
            self._fd_server,
            self._images,
        )
        sync: asyncio.Task[None] | None = None
        if not spec.load_weights:
            sync = self._run_in_background(pool.sync.run())
        try:
            async with self._joining(pool):
                await self._start_engines(pool)
        except BaseException:
            del self._pools[spec.name]
            self._hosts.pop(spec.name, None)
            if sync is not None:
                self._background.remove(sync)
                sync.cancel()
            raise
        if not spec.load_weights:
            for idx, node in self._generators.items():
                self._extend(pool, idx, node)

    def check_node(self, node: JobNode) -> None:
        for pool in self._pools_of_trainer():
            pool.spec.engine_specs_on(node.gpus, first_idx=0)

    def add_node(self, idx: int, node: JobNode) -> list[str]:
        """Starts engines on a node for all pools with the trainer's weights, even later ones."""
        self._generators[idx] = node
        return [name for pool in self._pools_of_trainer() for name in self._extend(pool, idx, node)]

    def remove_node(self, idx: int) -> None:
        """Called when a node has left or is lost; later pools do not use it. Its engines end."""
        self._generators.pop(idx, None)

    def _pools_of_trainer(self) -> list[EnginePool]:
        return [pool for pool in self._pools.values() if not pool.spec.load_weights]

    def _extend(self, pool: EnginePool, idx: int, node: JobNode) -> list[str]:
        specs = pool.spec.engine_specs_on(node.gpus, first_idx=pool.next_idx)
        for spec in specs:
            pool.add(self._start(spec, idx, pool.may_start))
        return [spec.name for spec in specs]

    async def _start_engines(self, pool: EnginePool) -> None:
        try:
            nodes = pool.spec.nodes
            specs, unused = reuse_engines(
                pool.spec.name, pool.spec.engine_specs(), nodes, self._warm()
            )
            for node, names in unused.items():
                await self._end_warm(node, names)
            for idx, (spec, node) in enumerate(zip(specs, nodes, strict=True)):
                pool.add(self._start(spec, node, pool.may_start))
                for follower, there in pool.spec.follower_specs(idx):
                    pool.add_follower(spec.name, self._start(follower, there, pool.may_start))
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
        self._background.append(task)
        return task

    def report_work(self, name: str, has_work: bool) -> None:
        self[name]  # raises if there is no such pool
        slicing = self._slicings.get(self._hosts.get(name, name))
        if slicing is not None:
            slicing.report(name, has_work)

    async def invalidate(self) -> None:
        """Called when the trainer that made the weights was restarted."""
        for name, pool in list(self._pools.items()):
            if pool.spec.load_weights:
                continue
            async with self._reserved_for_trainer(name, _INVALIDATE_LIMIT_S):
                await pool.invalidate()
        for slicing in self._slicings.values():
            slicing.forget_work()

    async def pause(self, name: str, mode: str, timeout_s: float) -> None:
        async with self._reserved_for_trainer(name, timeout_s):
            await self[name].pause(mode, timeout_s)

    async def resume(self, name: str, timeout_s: float) -> None:
        async with self._reserved_for_trainer(name, timeout_s):
            await self[name].resume(timeout_s)

    async def sleep(self, name: str, level: SleepLevel, timeout_s: float) -> None:
        async with self._reserved_for_trainer(name, timeout_s, sleeps=True):
            await self[name].sleep(level, timeout_s)

    async def wake(self, name: str, tags: list[Tag], timeout_s: float) -> None:
        async with self._reserved_for_trainer(name, timeout_s, sleeps=False):
            await self[name].wake(tags, timeout_s)

    def _reserved_for_trainer(
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

    async def sync(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """Answers a rank's message of a weight sync. A sync claims the memory of pools that share
        it with this one."""
        message = decode_call(call)
        pool, slicing = self[message.pool], self._slicings.get(message.pool)
        async with contextlib.AsyncExitStack() as beginning:
            if isinstance(message, SyncBegin):
                if slicing is not None:
                    await beginning.enter_async_context(slicing.sync_begins(message.left_s))
                await beginning.enter_async_context(pool.sync_begins(message))
            return encode(await pool.sync.answer(message))
