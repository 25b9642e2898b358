"""Pools: engines with one model and one mode, moved through their lifecycle together.

An operation on a pool asks all engines at once. An engine that fails or is late is killed and
replaced by its restart policy; the others go on. An engine that comes up while the pool is
asleep is put to sleep too, so that a trainer's memory is never taken by a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Self

from umbra.runtime.actor import ActorSpec
from umbra.runtime.errors import ConfigError, DeadlineExceeded, EngineError, WeightSyncError
from umbra.runtime.lifecycle import EngineState, SleepLevel, Tag, catch_up
from umbra.runtime.pool_engine import PoolEngine
from umbra.runtime.restart import RestartPolicy
from umbra.runtime.rpc.client import Client
from umbra.runtime.supervised import ActorState, SupervisedActor
from umbra.runtime.weights.coordinator import SyncCoordinator, SyncSettings
from umbra.runtime.weights.memfd import FdServer

logger = logging.getLogger(__name__)

# State changes a watcher has not taken yet. A watcher that is this far behind is stuck.
_MAX_UNREAD_CHANGES: Final = 10_000
_SETTLE_TIMEOUT_S: Final = 60.0
# From SIGKILL to reaped: a large engine needs seconds to free its memory.
_END_LIMIT_S: Final = 30.0
_KNOWN_MODES: Final = ("hybrid", "standalone")
_KNOWN_ON_UPDATE: Final = ("abort", "keep", "drain")


def update_waves_problem(update_waves: int, mode: str, count: int) -> str:
    """What is wrong with the setting, and what to change; "" where nothing is."""
    if update_waves == 1:
        return ""
    if mode != "standalone":
        return (
            f"update_waves {update_waves} is for mode 'standalone': {mode} engines generate "
            "nothing when they are updated; set update_waves to 1, or mode to 'standalone'"
        )
    if not 1 <= update_waves <= count:
        return (
            f"update_waves {update_waves} is not possible with {count} engines: use 1 to {count}, "
            "or raise count"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """How to start a pool.

    Attributes:
        engine: `module:Class` of the engine actor.
        count: number of engines on this node.
        mode: hybrid engines take turns with the trainer (sleep and wake); standalone ones do not.
        kwargs: for the engine's constructor.
        on_update: what a sync does to running generation: abort (resumed under the new weights),
            keep (frozen, goes on) or drain (finished first).
        update_waves: 1 updates all engines at once; more updates one part of them after the other,
            while the others generate. For standalone engines, at most one wave for each.
        bucket_nbytes: size of each of the four buffers that weights travel in, see SyncSettings.
    """

    name: str
    engine: str
    count: int
    mode: str = "hybrid"
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 300.0
    hung_limit_s: float = 15.0
    busy_limit_s: float = 300.0
    stall_limit_s: float = 100.0
    grace_s: float = 3.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    memory_limit_nbytes: int = 0
    on_update: str = "abort"
    update_waves: int = 1
    bucket_nbytes: int = 2 << 20

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"pool {self.name!r} has count {self.count}: use 1 or more")
        if self.on_update not in _KNOWN_ON_UPDATE:
            raise ConfigError(f"on_update {self.on_update!r}: use {', '.join(_KNOWN_ON_UPDATE)}")
        if self.mode not in _KNOWN_MODES:
            raise ConfigError(f"pool mode {self.mode!r}: use {' or '.join(_KNOWN_MODES)}")
        problem = update_waves_problem(self.update_waves, self.mode, self.count)
        if problem:
            raise ConfigError(f"pool {self.name!r}: {problem}")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        fields = dict(data)
        fields["restart"] = RestartPolicy(**fields.get("restart", {}))
        return cls(**fields)

    def engine_specs(self) -> list[ActorSpec]:
        """One actor per engine, named POOL-0, POOL-1, ..."""
        return [
            ActorSpec(
                name=f"{self.name}-{idx}",
                target=self.engine,
                kwargs=self.kwargs,
                restart=self.restart,
                start_timeout_s=self.start_timeout_s,
                hung_limit_s=self.hung_limit_s,
                busy_limit_s=self.busy_limit_s,
                stall_limit_s=self.stall_limit_s,
                grace_s=self.grace_s,
                env=self.env,
                memory_limit_nbytes=self.memory_limit_nbytes,
                role="engine",
            )
            for idx in range(self.count)
        ]


class EnginePool:
    """The engines of one pool. Owned by the supervisor; all calls are on its loop.

    `sync` carries weights to them; its `version` is the last one committed, which an engine
    that restarts or joins has to be brought to.
    """

    def __init__(
        self,
        spec: PoolSpec,
        client: Client,
        note: Callable[[str], None],
        tasks: asyncio.TaskGroup,
        fd_server: FdServer,
        fd_socket: str,
    ) -> None:
        self.spec = spec
        self.sync = SyncCoordinator(
            spec.name,
            lambda: self.engines.values(),
            fd_server,
            fd_socket,
            SyncSettings(
                bucket_nbytes=spec.bucket_nbytes,
                pause_mode=spec.on_update,
                require_engine=False,
                update_waves=spec.update_waves,
            ),
        )
        self.engines: dict[str, PoolEngine] = {}
        self._client = client
        self._note = note
        self._tasks = tasks
        self._sleep_level: SleepLevel | None = None
        self._gathering: set[int] = set()  # ranks that publish the current version once more
        self._returned: set[tuple[str, int]] = set()
        self._watchers: set[asyncio.Queue[dict[str, Any]]] = set()

    def add(self, actor: SupervisedActor) -> None:
        """Takes an actor as an engine; its process may not be up yet."""
        self.engines[actor.spec.name] = PoolEngine(actor, self._client, self._on_engine_change)

    async def wait_running(self) -> None:
        """Until every engine is up; raises the first one's failure, such as ActorDied."""
        timeout_s = self.spec.start_timeout_s + self.spec.grace_s + 5.0
        try:
            async with asyncio.TaskGroup() as waiting:
                for engine in self.engines.values():
                    waiting.create_task(engine.actor.wait_running(timeout_s))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def end(self) -> None:
        """Ends all engines for good and waits until they are reaped."""
        for engine in self.engines.values():
            engine.actor.stop()
        async with asyncio.timeout(self.spec.grace_s + _END_LIMIT_S):
            for engine in self.engines.values():
                await engine.actor.ended.wait()

    def on_actor_change(self, actor: SupervisedActor) -> None:
        """A process came up or ended."""
        engine = self.engines.get(actor.spec.name)
        if engine is None:
            return
        engine.follow_actor()
        if actor.state == ActorState.RUNNING and self._sleep_level is not None:
            level = self._sleep_level
            self._tasks.create_task(self._settle(engine, lambda: engine.sleep(level, 30.0)))

    async def watch(self) -> AsyncGenerator[dict[str, Any], None]:
        """First the state of every engine, then each change (`PoolEngine.describe`)."""
        changes: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MAX_UNREAD_CHANGES)
        self._watchers.add(changes)
        try:
            for state in self.states():
                yield state
            while True:
                yield await changes.get()
        finally:
            self._watchers.discard(changes)

    def catch_up(self) -> dict[str, Any]:
        """See `umbra.runtime.lifecycle.catch_up`; no engine while a sync is under way."""
        lifecycles = {name: engine.lifecycle for name, engine in self.engines.items()}
        waiting = catch_up(lifecycles, self.sync.version, not self.sync.is_syncing)
        return {
            "version": self.sync.version,
            "engines": [[name, self.engines[name].incarnation] for name in waiting],
            "ranks": sorted(self._gathering),
        }

    def states(self) -> list[dict[str, Any]]:
        return [engine.describe() for engine in self.engines.values()]

    def _on_engine_change(self, engine: PoolEngine) -> None:
        state = engine.describe()
        logger.debug("%s#%d is %s", engine.name, engine.incarnation, engine.lifecycle)
        key = (engine.name, engine.incarnation)
        if (
            engine.state == EngineState.SERVING
            and engine.incarnation > 1
            and key not in self._returned
        ):
            self._returned.add(key)
            self._note(f"{engine.name}#{engine.incarnation} serves again, version {engine.version}")
        for changes in list(self._watchers):
            try:
                changes.put_nowait(state)
            except asyncio.QueueFull:
                self._watchers.discard(changes)

    # -- operations on all engines -------------------------------------------------------

    async def pause(self, mode: str, timeout_s: float) -> None:
        await self._after_sync(timeout_s)
        await self._pause(mode, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._after_sync(timeout_s)
        await self._all({EngineState.PAUSED}, lambda engine: engine.resume(timeout_s))

    async def sleep(self, level: SleepLevel, timeout_s: float) -> None:
        """Frees memory; engines that serve are paused (mode `abort`) first."""
        await self._after_sync(timeout_s)
        self._sleep_level = level
        await self._pause("abort", timeout_s)
        sleepy = {EngineState.PAUSED, EngineState.PENDING_WEIGHTS}
        await self._all(sleepy, lambda engine: engine.sleep(level, timeout_s))

    async def wake(self, tags: list[Tag], timeout_s: float) -> None:
        await self._after_sync(timeout_s)
        self._sleep_level = None
        drowsy = {EngineState.ASLEEP, EngineState.PAUSED, EngineState.PENDING_WEIGHTS}
        await self._all(drowsy, lambda engine: engine.wake(tags, timeout_s))

    async def invalidate(self) -> None:
        """Disowns the version: the trainer that made the weights was restarted."""
        self.sync.version = None
        await self._pause("abort", _SETTLE_TIMEOUT_S)
        for engine in self.engines.values():
            engine.invalidate()

    async def _after_sync(self, timeout_s: float) -> None:
        """A rank may have a sync's outcome, and go on, a moment before the sync is settled."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.sync.wait_settled()
        except TimeoutError:
            raise DeadlineExceeded(
                f"pool {self.spec.name}: a weight sync is under way and did not end within "
                f"{timeout_s:.3g} s; other operations wait for it"
            ) from None

    async def _pause(self, mode: str, timeout_s: float) -> None:
        await self._all({EngineState.SERVING}, lambda engine: engine.pause(mode, timeout_s))

    async def _all(
        self, states: set[EngineState], request: Callable[[PoolEngine], Awaitable[None]]
    ) -> None:
        concerned = [engine for engine in self.engines.values() if engine.state in states]
        async with asyncio.TaskGroup() as requests:
            for engine in concerned:
                requests.create_task(self._settle(engine, partial(request, engine)))

    async def _settle(self, engine: PoolEngine, request: Callable[[], Awaitable[None]]) -> None:
        """One engine's part: a failure is that engine's end, not the pool's."""
        incarnation = engine.incarnation
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                await request()
        except (EngineError, TimeoutError) as error:
            if engine.incarnation == incarnation and engine.state != EngineState.DEAD:
                engine.kill(str(error) or "no answer in time")

    # -- weight syncs --------------------------------------------------------------------

    async def sync_begin(
        self, version: int, rank: int, world_size: int, manifest: object, timeout_s: float
    ) -> dict[str, Any]:
        """See `SyncCoordinator.sync_begin`. A sync wakes the pool."""
        if self.sync.version is not None and version < self.sync.version:
            raise WeightSyncError(
                f"pool {self.spec.name} has version {self.sync.version} already, got {version}"
            )
        self._sleep_level = None
        is_repeated = version == self.sync.version
        if is_repeated:
            self._gathering.add(rank)
        try:
            return await self.sync.sync_begin(version, rank, world_size, manifest, timeout_s)
        finally:
            if is_repeated:
                self._gathering.discard(rank)
