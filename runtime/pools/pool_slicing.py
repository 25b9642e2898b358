"""Time-slices pools that share memory: carries out the decisions of `time_slicing`.

    host (policy)   SERVING ─pause, sleep(1)─▶ ASLEEP ..................... ─wake, resume─▶ SERVING
    guest (judge)   ASLEEP .................... ─wake, resume─▶ SERVING ─pause, sleep(1)─▶ ASLEEP

The next pool wakes when no engine of the last one holds memory any more: it reported that it freed
the memory, or its process has ended. Engines that die wait for their pool's turn before they are
started again. The trainer's calls for the host (sleep, wake, a sync) end a guest's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.pools.engine_pool import EnginePool
from umbra.runtime.pools.time_slicing import TimeSlicing

logger = logging.getLogger(__name__)

_START_LIMIT_S: Final = 3600.0
"""Limit for a pool whose turn another one's start delays; engines' own limits are shorter."""


class PoolSlicing:
    """The pools that share the memory of one of them, `host`. Owned by the supervisor. One lock
    covers everything that moves one of these pools. `run` lives until cancelled."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._slicing = TimeSlicing(host)
        self._pools: dict[str, EnginePool] = {}
        self._lock = asyncio.Lock()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self._trainer_needs_memory = False
        self._num_claims = 0
        self._num_syncs = 0  # calls of ranks that begin one

    def report(self, pool: str, has_work: bool) -> None:
        self._slicing.report(pool, has_work, self._clock())
        self._changed.set()

    def take_host(self, host: EnginePool) -> None:
        """Adds a host that already exists and has the memory."""
        self._pools[self._host] = host

    @asynccontextmanager
    async def joining(self, pool: EnginePool) -> AsyncGenerator[None]:
        """Adds the pool; inside the block it has the memory, so its engines can start."""
        name = pool.spec.name
        async with self._locked(_START_LIMIT_S):
            self._pools[name] = pool
            if name != self._host:
                self._slicing.add(name, pool.spec.turn_rules)
            try:
                await self._hand_over(name)
                yield
            except BaseException:
                del self._pools[name]
                if name != self._host:
                    self._slicing.remove(name)
                raise

    @asynccontextmanager
    async def reserved_for_trainer(
        self, timeout_s: float, *, sleeps: bool | None = None
    ) -> AsyncGenerator[None]:
        """Inside the block the trainer moves the host, and no guest is awake. With `sleeps`
        True, no guest wakes afterwards either, until a call with False or a sync; None
        changes nothing."""
        async with self._claimed(timeout_s):
            before = self._trainer_needs_memory
            if sleeps is not None:
                self._trainer_needs_memory = sleeps
            try:
                await self._hand_over(self._host, wakes=not self._trainer_needs_memory)
                yield
            except Exception:  # the call was refused: nothing has moved
                self._trainer_needs_memory = before
                raise

    @asynccontextmanager
    async def sync_begins(self, timeout_s: float) -> AsyncGenerator[None]:
        """Inside the block a rank begins a sync; then the host has the memory until its end."""
        self._num_syncs += 1
        try:
            async with self._claimed(timeout_s):
                self._trainer_needs_memory = False
                # The sync wakes the engines that take part in it; others wake after it.
                await self._hand_over(self._host, wakes=False)
            yield
        finally:
            self._num_syncs -= 1
            self._changed.set()

    def forget_work(self) -> None:
        """Resets reports, because the processes that made them have ended; new ones will report."""
        for name in self._pools:
            self.report(name, has_work=name == self._host)

    async def run(self) -> None:
        while True:
            self._changed.clear()
            if self._is_syncing:
                await self._pools[self._host].sync.wait_settled()
            async with self._lock:
                look_again_at = await self._settle()
            wait_s = None if look_again_at is None else look_again_at - self._clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _settle(self) -> float | None:
        """Carries out the current decision; returns when to decide again if nothing happens."""
        self._slicing.is_reserved = (
            self._trainer_needs_memory or self._num_syncs > 0 or self._is_syncing
        )
        decision = self._slicing.decide(self._clock())
        may_wake = not self._slicing.is_reserved
        if decision.holder != self._slicing.holder:
            await self._hand_over(decision.holder, wakes=may_wake)
            return self._clock()  # another pool may have waited too long meanwhile
        if may_wake and decision.holder in self._pools:
            await self._pools[decision.holder].reclaim_memory()
        return decision.look_again_at

    async def _hand_over(self, to: str, *, wakes: bool = True) -> None:
        """Gives the memory to the pool `to` alone. If it is cancelled or fails half way, no turn
        has begun, and the next call repeats it."""
        began_at, last = self._clock(), self._slicing.holder
        async with asyncio.TaskGroup() as releasing:
            for name, pool in self._pools.items():
                if name != to:
                    releasing.create_task(pool.release_memory(self._hurry))
        self._slicing.begin(to, self._clock())
        if to in self._pools:
            self._pools[to].may_start.set()
            if wakes:
                await self._pools[to].reclaim_memory()
        if to != last:
            took_s = self._clock() - began_at
            logger.info("pool %s has the memory after %s, within %.3f s", to, last, took_s)

    @property
    def _is_syncing(self) -> bool:
        return self._host in self._pools and self._pools[self._host].sync.is_syncing

    @asynccontextmanager
    async def _claimed(self, timeout_s: float) -> AsyncGenerator[None]:
        """Gets the lock for the trainer, which does not wait for a pool that is starting."""
        self._num_claims += 1
        self._hurry.set()
        try:
            async with self._locked(timeout_s):
                yield
        finally:
            self._num_claims -= 1
            if not self._num_claims:
                self._hurry.clear()

    @asynccontextmanager
    async def _locked(self, timeout_s: float) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"pool {self._slicing.holder} did not free the memory that it shares with "
                f"{self._host} within {timeout_s:.3g} s"
            ) from None
        try:
            yield
        finally:
            self._lock.release()
            self._changed.set()
