from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Set
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from umbra.runtime.actor.remote_actor import ActorProcess
from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.engine_api.lifecycle import (
    ALL_TAGS,
    EngineLifecycle,
    EngineState,
    SleepLevel,
    Tag,
)
from umbra.runtime.errors import (
    ActorError,
    EngineUnhealthy,
    ProtocolError,
    TransportError,
    UmbraError,
    WakeError,
    brief,
)
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.tracing.spans import span

logger = logging.getLogger(__name__)

_OWN_VERSION: Final = 0
"""Version of weights that engines have loaded by themselves."""


class PoolEngine:
    """One engine of a pool, as the supervisor sees it. Owned by its pool.

    A request that changes its state first goes through the lifecycle, so an illegal one is refused
    before the engine sees it. An engine that dies during a request is simply DEAD afterwards. With
    `loads_weights` it serves as version 0 once it is ready.
    """

    def __init__(
        self,
        actor: ActorProcess,
        client: Client,
        on_change: Callable[[PoolEngine], None],
        *,
        loads_weights: bool = False,
    ) -> None:
        self.actor = actor
        self.lifecycle = EngineLifecycle()
        self._client = client
        self._on_change = on_change
        self._loads_weights = loads_weights
        self._handle: Handle | None = None
        self._holds_memory = False  # in ASLEEP: it has not reported yet that all is freed
        self._entered_at = time.monotonic()  # its state

    @property
    def name(self) -> str:
        return self.actor.spec.name

    @property
    def incarnation(self) -> int:
        return self.actor.incarnation

    @property
    def node_id(self) -> str:
        return "" if self._handle is None else self._handle.ref.node_id

    @property
    def state(self) -> EngineState:
        return self.lifecycle.state

    @property
    def state_age_s(self) -> float:
        return time.monotonic() - self._entered_at

    @property
    def version(self) -> int | None:
        return self.lifecycle.version

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "incarnation": self.incarnation,
            "state": str(self.state),
            "version": self.version,
            "ref": self.actor.ref,
            "num_restarts": self.actor.num_restarts,
            "has_ended": self.actor.state in (ActorState.STOPPED, ActorState.FAILED),
        }

    @property
    def takes_no_memory(self) -> bool:
        """Whether it holds none of the memory that pools share: it is asleep or has no process."""
        if self.actor.state != ActorState.RUNNING:
            return not self.actor.has_process
        return self.state == EngineState.ASLEEP and not self._holds_memory

    @property
    def is_starting(self) -> bool:
        """Whether it has a process that does not answer yet."""
        return self.actor.has_process and self.actor.state == ActorState.STARTING

    def follow_actor(self) -> None:
        if self.actor.state == ActorState.RUNNING and self.actor.ref is not None:
            self._handle = self._client.handle(self.actor.ref)
            # Opened here, one by one. The first call to a whole pool would open all at once.
            self._client.connection(self.actor.ref)
            if self.state == EngineState.DEAD:
                self._enter(self.lifecycle.restart())
            self._enter(self.lifecycle.started(_OWN_VERSION if self._loads_weights else None))
        elif self.state != EngineState.DEAD:
            if self._handle is not None:
                self._client.drop(self._handle.ref, "its process ended")
            self._handle = None
            self._enter(self.lifecycle.died())

    def _enter(self, lifecycle: EngineLifecycle) -> None:
        before, self.lifecycle = self.state, lifecycle
        if self.state != before:
            self._entered_at = time.monotonic()
        self._on_change(self)

    def invalidate(self) -> None:
        if self.lifecycle.version is not None:
            self._enter(self.lifecycle.invalidate())

    def kill(self, reason: str) -> None:
        """Ends this incarnation; the restart policy replaces it. While it is being stopped,
        unanswered calls are no failure, and this does nothing."""
        if self.actor.is_stopping:
            return
        logger.warning("killing %s#%d: %s", self.name, self.incarnation, reason)
        self.actor.kill(reason)

    async def pause(self, mode: str, timeout_s: float) -> None:
        """SERVING → PAUSED, once the engine has stopped generating."""
        if self.state != EngineState.SERVING:
            return
        self._enter(self.lifecycle.pause())
        await self._request("pause", mode, timeout_s=timeout_s)

    async def resume(self, timeout_s: float) -> None:
        """PAUSED → SERVING."""
        if self.state == EngineState.SERVING:
            return
        self.lifecycle.resume()  # refuses before the engine is asked
        async with self._allocating(ALL_TAGS):
            await self._request("resume", timeout_s=timeout_s)
            self._enter(self.lifecycle.resume())

    async def sleep(self, level: SleepLevel, tags: Set[Tag], timeout_s: float) -> None:
        """PAUSED or PENDING_WEIGHTS → ASLEEP, or the same two where only one part sleeps."""
        self._enter(self.lifecycle.sleep(level, frozenset(tags)))
        self._holds_memory = True
        await self._request("sleep", level, sorted(tags), timeout_s=timeout_s)
        self._holds_memory = False
        logger.debug("%s#%d has freed its memory", self.name, self.incarnation)

    async def wake(self, tags: Iterable[Tag], timeout_s: float) -> None:
        asleep = frozenset(tags) - self.lifecycle.awake
        if not asleep:
            return
        async with self._allocating(asleep):
            self._enter(self.lifecycle.wake(asleep))
            await self._request("wake", sorted(asleep), timeout_s=timeout_s)
            self._enter(self.lifecycle.woken())

    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str:
        problem: str = await self._request("probe_import", allocations, timeout_s=timeout_s)
        return problem

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        """Sends the layout to come; the weights stay as they are until `load`."""
        await self._request("prepare_update", version, manifest, buckets, timeout_s=timeout_s)

    async def load(self, version: int, timeout_s: float) -> dict[str, Any]:
        """→ UPDATING: the weights have no version. Returns once the engine's model has them, and
        fails soon after the sync is aborted."""
        async with self._allocating({"weights"}):
            self._enter(self.lifecycle.begin_update(version))
            loaded: dict[str, Any] = await self._request("load", timeout_s=timeout_s)
        return loaded

    async def verify_update(self, regions: list[list[int | None]], timeout_s: float) -> list[str]:
        """Returns a text for each checksum that differs from `regions`."""
        answer: Any = await self._request("verify_update", regions, timeout_s=timeout_s)
        if not isinstance(answer, list):
            raise ProtocolError(f"{self.name} verified an update with {brief(answer)}")
        return [str(text) for text in cast("list[Any]", answer)]

    async def commit_update(self, version: int, timeout_s: float) -> None:
        """UPDATING → PAUSED(version) → SERVING(version)."""
        self.lifecycle.commit_update(version)  # refuses before the engine is asked
        async with self._allocating({"kv_cache"}):
            await self._request("commit_update", timeout_s=timeout_s)
            self._enter(self.lifecycle.commit_update(version))
            self._enter(self.lifecycle.resume())

    async def abort_update(self, timeout_s: float) -> None:
        """Ends the update; UPDATING → PENDING_WEIGHTS. Before `load` the version stays."""
        if self.state == EngineState.UPDATING:
            self._enter(self.lifecycle.abort_update())
        await self._request("abort_update", timeout_s=timeout_s)

    async def count_requests(self, timeout_s: float) -> tuple[int, int] | None:
        """Requests (running, queued); None if it does not answer."""
        try:
            stats = await self._call("stats", timeout_s=timeout_s)
        except EngineUnhealthy:
            return None
        return int(stats["running"]), int(stats["waiting"])

    @asynccontextmanager
    async def _allocating(self, tags: Set[Tag]) -> AsyncGenerator[None]:
        """Reports whether sleeping `tags` got memory. An engine that ends now may
        have lacked it."""
        if tags <= self.lifecycle.awake:
            yield
            return
        try:
            yield
        except (EngineUnhealthy, WakeError) as error:
            if isinstance(error.__cause__, WakeError | TransportError | ActorError):
                await self.actor.failed_to_wake()
            raise
        if self.lifecycle.awake == ALL_TAGS:
            self.actor.woke()

    async def _request(self, method: str, *args: object, timeout_s: float) -> Any:
        with span(method, self.name, incarnation=self.incarnation):
            return await self._call(method, *args, timeout_s=timeout_s)

    async def _call(self, method: str, *args: object, timeout_s: float) -> Any:
        if self._handle is None:
            raise EngineUnhealthy(f"{self.name}#{self.incarnation} is not running")
        incarnation = self.incarnation
        try:
            return await self._handle.call(method, *args, timeout_s=timeout_s)
        except UmbraError as error:
            kind = WakeError if isinstance(error, WakeError) else EngineUnhealthy
            raise kind(f"{self.name}#{incarnation} failed at {method}: {error}") from error
