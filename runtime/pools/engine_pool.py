from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.remote_actor import ActorProcess
from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.cluster.placement import engine_idx
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.lifecycle import (
    ALL_TAGS,
    EngineState,
    SleepLevel,
    Tag,
    catch_up,
    check_tags,
)
from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, EngineError, WeightSyncError
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.pools.sync_coordinator import SyncCoordinator
from umbra.runtime.waiting import first_of
from umbra.runtime.weights.image.fd_server import FdServer
from umbra.runtime.weights.image.image_memory import ImageHolder
from umbra.runtime.weights.sync_messages import SyncBegin

logger = logging.getLogger(__name__)

# State changes that a watcher has not taken yet. A watcher that is this far behind is stuck.
_MAX_UNREAD_CHANGES: Final = 10_000
_SETTLE_TIMEOUT_S: Final = 60.0
# From SIGKILL to reaped: a large engine needs seconds to free its memory.
_END_LIMIT_S: Final = 30.0
_GONE_LIMIT_S: Final = 75.0
# From SIGKILL until its memory is verified free: the end of the process, of its orphans, and of its
# GPU allocations, each of which has its own limit in the supervisor. A shorter limit wakes the next
# pool too early; a longer one keeps all pools waiting for a process that hangs in a driver.
_SLICED: Final[tuple[SleepLevel, frozenset[Tag]]] = 1, ALL_TAGS
# The level and the parts of a sleep between time slices.


class EnginePool:
    """Engines with one model and one mode, moved through their lifecycle together on the
    supervisor's loop.

    An operation asks all engines at once. An engine that fails or is late is killed and replaced
    under its restart policy; the others continue. While a hybrid pool is asleep, its memory belongs
    to the trainer: `may_start` is not set, and an engine that is starting is put to sleep once it
    is ready. Engines that restart or join must be updated to `sync.version`.
    """

    def __init__(
        self,
        spec: PoolSpec,
        context: NodeContext,
        tasks: asyncio.TaskGroup,
        fd_server: FdServer,
        images: ImageHolder,
    ) -> None:
        self.spec = spec
        self.engines: dict[str, PoolEngine] = {}
        self.sync = SyncCoordinator(
            spec.name, self.engines.values, fd_server, images, spec, self._record_abort
        )
        self.next_idx = 0  # in the name of the next engine
        self._leaders: dict[str, PoolEngine] = {}  # by the name of a follower
        self._followers: list[ActorProcess] = []
        self._running_followers: set[str] = set()  # names
        self._context, self._tasks = context, tasks
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._freed: tuple[SleepLevel, frozenset[Tag]] | None = None  # while it sleeps
        self._served_before: set[tuple[str, int]] | None = None  # engines that served before
        self._moved = asyncio.Event()
        self._moves: set[asyncio.Task[None]] = set()  # of engines, in progress
        self._gathering: set[int] = set()  # ranks that publish the current version again
        self._returned: dict[str, int] = {}  # by engine: the last incarnation that was reported
        self._watchers: set[asyncio.Queue[dict[str, Any]]] = set()

    def add(self, actor: ActorProcess) -> None:
        self.next_idx = max(self.next_idx, engine_idx(actor.spec.name) + 1)
        self.engines[actor.spec.name] = PoolEngine(
            actor,
            self._context.client,
            self._on_engine_change,
            loads_weights=self.spec.load_weights,
        )
        if actor.state == ActorState.RUNNING:  # it ran before, for a pool of the last epoch
            self.on_actor_change(actor)

    def add_follower(self, engine: str, actor: ActorProcess) -> None:
        """Adds a part of an engine on another node. Its end kills the engine, which
        ends its parts."""
        self._followers.append(actor)
        self._leaders[actor.spec.name] = self.engines[engine]

    def find_engine(self, actor: str) -> PoolEngine | None:
        return self.engines.get(actor) or self._leaders.get(actor)

    async def close(self) -> None:
        """Leaves the engines alone, whatever they are doing: another pool takes them over."""
        for move in self._moves:
            move.cancel()
        await self._finish_moves()

    def remove(self, actor: ActorProcess) -> None:
        engine = self.engines.pop(actor.spec.name, None)
        if engine is not None:
            self._on_engine_change(engine)

    async def wait_running(self) -> None:
        """Waits until every engine is ready; raises the first one's failure, such as ActorDied."""
        timeout_s = self.spec.start_timeout_s + self.spec.grace_s + 5.0
        try:
            async with asyncio.TaskGroup() as waiting:
                for engine in self.engines.values():
                    waiting.create_task(engine.actor.wait_running(timeout_s))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def end(self) -> None:
        """Ends all engines for good and waits until they are reaped."""
        actors = [*(engine.actor for engine in self.engines.values()), *self._followers]
        for actor in actors:
            actor.stop()
        async with asyncio.timeout(self.spec.grace_s + _END_LIMIT_S):
            for actor in actors:
                await actor.ended.wait()

    def on_actor_change(self, actor: ActorProcess) -> None:
        engine = self.engines.get(actor.spec.name)
        if engine is None:
            self._on_follower_change(actor)
            return
        engine.follow_actor()
        if actor.state == ActorState.RUNNING and self._freed is not None:
            freed = self._freed
            self._move(engine, lambda: self._put_to_sleep(engine, *freed))
        self._moved.set()

    def _on_follower_change(self, follower: ActorProcess) -> None:
        """Kills the engine once when a follower ends: it may be back before the follower."""
        name = follower.spec.name
        if name not in self._leaders:
            return
        if follower.state == ActorState.RUNNING:
            self._running_followers.add(name)
        elif name in self._running_followers:
            self._running_followers.remove(name)
            self._leaders[name].kill(f"its follower {name} has ended, whose log has the reason")

    async def watch(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields every engine's state, then each change. Raises ConnectionLost for
        a slow watcher."""
        changes: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MAX_UNREAD_CHANGES)
        self._watchers.add(changes)
        try:
            for state in self.states():
                yield state
            while changes in self._watchers:  # it is removed when it is full
                yield await changes.get()
        finally:
            self._watchers.discard(changes)
        raise ConnectionLost(
            f"{_MAX_UNREAD_CHANGES} changes of pool {self.spec.name!r} were not read: the watcher "
            "does not keep up with its engines"
        )

    def catch_up(self) -> dict[str, Any]:
        """See `lifecycle.catch_up`; no engine while a sync is in progress."""
        lifecycles = {name: engine.lifecycle for name, engine in self.engines.items()}
        waiting = catch_up(lifecycles, self.sync.version, not self.sync.is_syncing)
        return {
            "version": self.sync.version,
            "engines": [[name, self.engines[name].incarnation] for name in waiting],
            "ranks": sorted(self._gathering),
        }

    def states(self) -> list[dict[str, Any]]:
        return [engine.describe() for engine in self.engines.values()]

    def _record_abort(self, version: int, reason: str) -> None:
        text = f"the sync of version {version} was aborted: {reason}"
        self._context.record(text, "sync_failed", self.spec.name)

    def _on_engine_change(self, engine: PoolEngine) -> None:
        state = engine.describe()
        logger.debug("%s#%d is %s", engine.name, engine.incarnation, engine.lifecycle)
        self._moved.set()
        if (
            engine.state == EngineState.SERVING
            and engine.incarnation > 1
            and self._returned.get(engine.name) != engine.incarnation
        ):
            self._returned[engine.name] = engine.incarnation
            label = f"{engine.name}#{engine.incarnation}"
            text = f"{label} serves again, version {engine.version}"
            self._context.note(text, "serves", engine.name)
        for changes in list(self._watchers):
            try:
                changes.put_nowait(state)
            except asyncio.QueueFull:
                self._watchers.discard(changes)

    async def pause(self, mode: str, timeout_s: float) -> None:
        if mode not in ("abort", "keep", "drain"):
            raise ValueError(f"pause mode must be abort, keep or drain, got {mode!r}")
        await self._after_sync(timeout_s)
        await self._pause(mode, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._after_sync(timeout_s)
        await self._all({EngineState.PAUSED}, lambda engine: engine.resume(timeout_s))

    async def sleep(self, level: SleepLevel, tags: list[Tag], timeout_s: float) -> None:
        """Pauses engines that serve (mode `abort`), and frees the parts in `tags`. If these are
        none, engines may still start."""
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
        check_tags(tags)
        if len(tags) == 1 and not engine_kind(self.spec.engine).sleeps_by_part:
            raise EngineError(
                f"pool {self.spec.name}: engine {self.spec.engine!r} frees weights and KV cache "
                f"together, got {tags}"
            )
        await self._after_sync(timeout_s)
        if level == 2 and "weights" in tags and (self.spec.load_weights or self.spec.lora_rank):
            raise EngineError(
                f"pool {self.spec.name}: level 2 would lose the weights, and no sync restores "
                "them: sleep at level 1"
            )
        self._served_before = None
        if not tags:
            await self._pause("abort", timeout_s)
            return
        self._freed = level, frozenset(tags)
        if self.spec.mode == "hybrid":
            self.may_start.clear()
        else:
            self.may_start.set()
        await self._pause("abort", timeout_s)
        sleepy = {EngineState.PAUSED, EngineState.PENDING_WEIGHTS}
        await self._all(sleepy, lambda engine: engine.sleep(level, frozenset(tags), timeout_s))

    async def wake(self, tags: list[Tag], timeout_s: float) -> None:
        check_tags(tags)
        await self._after_sync(timeout_s)
        self._freed = None
        self.may_start.set()
        drowsy = {EngineState.ASLEEP, EngineState.PAUSED, EngineState.PENDING_WEIGHTS}
        await self._all(drowsy, lambda engine: engine.wake(tags, timeout_s))

    async def invalidate(self) -> None:
        """Invalidates the version, because the trainer that made the weights was restarted. A sync
        in progress is undone first, which makes engines serve again."""
        if self.spec.load_weights:
            return
        await self._after_sync(_SETTLE_TIMEOUT_S)
        self.may_start.set()  # the trainer's memory was freed with it
        self.sync.version = None
        await self._pause("abort", _SETTLE_TIMEOUT_S)
        for engine in self.engines.values():
            engine.invalidate()

    async def release_memory(self, hurry: asyncio.Event) -> None:
        """Frees all memory and keeps the weights on the host, until `reclaim_memory`. Idempotent.

        Engines that are starting get the time for it, unless `hurry` is set, and the others serve
        meanwhile. An engine that does not free its memory is killed. One that does not end then,
        because it hangs in a driver, is reported and not waited for: it may hold little memory, and
        waiting could block all pools.
        """
        self.may_start.clear()
        await self._until(lambda engine: not engine.is_starting, self.spec.start_timeout_s, hurry)
        self._kill_where(lambda engine: engine.is_starting, "its start kept another pool waiting")
        self._freed = _SLICED
        self._served_before = self._served_before or set()
        awake = {EngineState.SERVING, EngineState.PAUSED, EngineState.PENDING_WEIGHTS}
        await self._all(awake, lambda engine: self._put_to_sleep(engine, *_SLICED))
        await self._until(lambda engine: engine.takes_no_memory, _END_LIMIT_S)
        self._kill_where(lambda engine: not engine.takes_no_memory, "it did not free its memory")
        await self._until(lambda engine: engine.takes_no_memory, _GONE_LIMIT_S)
        for engine in self.engines.values():
            if not engine.takes_no_memory:
                self._context.note(
                    f"{engine.name}#{engine.incarnation} (pid {engine.actor.pid}) was killed "
                    f"{_GONE_LIMIT_S:.3g} s ago and still holds memory that pool {self.spec.name} "
                    "shares with others; the next pool to wake may run out of memory",
                    "fault",
                    engine.name,
                )

    async def reclaim_memory(self) -> None:
        """Undoes `release_memory`: engines get memory again, and serve if they did. If it is
        cancelled, the next call finishes it."""
        served = self._served_before
        self.may_start.set()
        if served is None:
            return
        self._freed = None
        await self._all({EngineState.ASLEEP}, lambda e: e.wake(ALL_TAGS, _SETTLE_TIMEOUT_S))
        await self._all({EngineState.PAUSED}, lambda e: self._serve_again(e, served))
        self._served_before = None

    async def _put_to_sleep(
        self, engine: PoolEngine, level: SleepLevel, tags: frozenset[Tag]
    ) -> None:
        if engine.state == EngineState.SERVING:
            if self._served_before is not None:
                self._served_before.add((engine.name, engine.incarnation))
            await engine.pause("abort", _SETTLE_TIMEOUT_S)
        if engine.state in (EngineState.PAUSED, EngineState.PENDING_WEIGHTS):
            await engine.sleep(level, tags, _SETTLE_TIMEOUT_S)

    async def _serve_again(self, engine: PoolEngine, served: set[tuple[str, int]]) -> None:
        if (engine.name, engine.incarnation) in served:
            await engine.resume(_SETTLE_TIMEOUT_S)

    async def _until(
        self,
        is_so: Callable[[PoolEngine], bool],
        timeout_s: float,
        hurry: asyncio.Event | None = None,
    ) -> None:
        hurry = hurry or asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(is_so(engine) for engine in self.engines.values()):
                    if hurry.is_set():
                        return
                    self._moved.clear()
                    await first_of(self._moved, hurry)

    def _kill_where(self, is_so: Callable[[PoolEngine], bool], reason: str) -> None:
        for engine in self.engines.values():
            if is_so(engine):
                engine.kill(reason)

    async def _after_sync(self, timeout_s: float) -> None:
        """Waits: a rank may have a sync's outcome a moment before the sync is settled."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.sync.wait_settled()
        except TimeoutError:
            raise DeadlineExceeded(
                f"pool {self.spec.name}: a weight sync is in progress and did not end within "
                f"{timeout_s:.3g} s; other operations wait for its end"
            ) from None

    async def _pause(self, mode: str, timeout_s: float) -> None:
        await self._all({EngineState.SERVING}, lambda engine: engine.pause(mode, timeout_s))

    async def _all(
        self, states: set[EngineState], request: Callable[[PoolEngine], Awaitable[None]]
    ) -> None:
        await self._finish_moves()
        for engine in [engine for engine in self.engines.values() if engine.state in states]:
            self._move(engine, partial(request, engine))
        await self._finish_moves()

    def _move(self, engine: PoolEngine, request: Callable[[], Awaitable[None]]) -> None:
        """Runs to its end even if the caller is gone: a half-finished wake is no valid state."""
        move = self._tasks.create_task(self._settle(engine, request))
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)

    async def _finish_moves(self) -> None:
        if self._moves:
            await asyncio.wait(self._moves)

    async def _settle(self, engine: PoolEngine, request: Callable[[], Awaitable[None]]) -> None:
        """Runs one engine's part. A failure ends that engine, not the pool."""
        incarnation = engine.incarnation
        try:
            await request()
        except EngineError as error:
            reason = str(error)
        except Exception as error:  # an engine must not end the supervisor
            logger.exception("moving %s failed unexpectedly", engine.name)
            reason = repr(error)
        else:
            return
        finally:
            self._moved.set()
        if engine.incarnation == incarnation and engine.state != EngineState.DEAD:
            engine.kill(reason)

    @asynccontextmanager
    async def sync_begins(self, message: SyncBegin) -> AsyncGenerator[None]:
        """Inside the block a rank begins a sync, which wakes the pool. Raises WeightSyncError if
        the pool does not accept the version."""
        if self.spec.load_weights:
            raise WeightSyncError(
                f"pool {self.spec.name} accepts no weights: its engines load their own "
                "(load_weights), and would load them again after a restart"
            )
        version = self.sync.version
        if version is not None and message.version < version:
            raise WeightSyncError(
                f"pool {self.spec.name} already has version {version}, got {message.version}"
            )
        await self._finish_moves()
        self._freed = None
        self.may_start.set()
        is_repeated = message.version == self.sync.version
        if is_repeated:
            self._gathering.add(message.rank)
        try:
            yield
        finally:
            if is_repeated:
                self._gathering.discard(message.rank)
