"""Pools that share memory have it in turn: carries out what `time_slicing` decides.

    host (policy)   SERVING ─pause, sleep(1)─▶ ASLEEP ..................... ─wake, resume─▶ SERVING
    guest (judge)   ASLEEP .................... ─wake, resume─▶ SERVING ─pause, sleep(1)─▶ ASLEEP

The next one wakes when no engine of the last one takes memory any more: it has said so, or its
process has ended. Engines that die wait for their pool's turn before they are started again.

What the trainer does with the host (sleep, wake, a sync) comes first: it ends a guest's turn.
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
"""For a pool whose turn another one's start holds up; engines' own limits end that sooner."""


class PoolSlicing:
    """The pools that share the memory of one of them, `host`. Owned by the supervisor.

    Everything that moves one of these pools happens under one lock. `run()` lives until cancelled.
    """

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._turns = TimeSlicing(host)
        self._pools: dict[str, EnginePool] = {}
        self._lock = asyncio.Lock()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_trainers = False
        self._num_claims = 0
        self._num_syncs = 0  # calls of ranks that begin one

    def report(self, pool: str, has_work: bool) -> None:
        """A pool has requests to answer, or none any more."""
        self._turns.report(pool, has_work, self._clock())
        self._changed.set()

    def take_host(self, host: EnginePool) -> None:
        """The host is there already; it has the memory."""
        self._pools[self._host] = host

    @asynccontextmanager
    async def joining(self, pool: EnginePool) -> AsyncGenerator[None]:
        """The pool belongs here from now on; its engines are started within, in its turn."""
        name = pool.spec.name
        async with self._locked(_START_LIMIT_S):
            self._pools[name] = pool
            if name != self._host:
                self._turns.add(name, pool.spec.turn_rules)
            try:
                await self._hand_over(name)
                yield
            except BaseException:
                del self._pools[name]
                if name != self._host:
                    self._turns.remove(name)
                raise

    @asynccontextmanager
    async def trainers_turn(
        self, timeout_s: float, *, sleeps: bool | None = None
    ) -> AsyncGenerator[None]:
        """The trainer moves the host: no guest is awake, nor will be before this is left.

        Args:
            sleeps: True: nor afterwards, until a call with False or a sync; None: as before.
        """
        async with self._claimed(timeout_s):
            before = self._is_trainers
            if sleeps is not None:
                self._is_trainers = sleeps
            try:
                await self._hand_over(self._host, wakes=not self._is_trainers)
                yield
            except Exception:  # it was refused: nothing has moved
                self._is_trainers = before
                raise

    @asynccontextmanager
    async def sync_begins(self, timeout_s: float) -> AsyncGenerator[None]:
        """A rank begins a sync within; the host then keeps the memory until it is settled."""
        self._num_syncs += 1
        try:
            async with self._claimed(timeout_s):
                self._is_trainers = False
                # The sync wakes what takes part in it; what does not is woken after it.
                await self._hand_over(self._host, wakes=False)
            yield
        finally:
            self._num_syncs -= 1
            self._changed.set()

    def forget_work(self) -> None:
        """Those who report were ended; others will."""
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
        """Brings things to what is decided; returns when to look again, if nothing happens."""
        self._turns.is_reserved = self._is_trainers or self._num_syncs > 0 or self._is_syncing
        decision = self._turns.decide(self._clock())
        is_risen = not self._turns.is_reserved
        if decision.holder != self._turns.holder:
            await self._hand_over(decision.holder, wakes=is_risen)
            return self._clock()  # meanwhile another may have waited too long
        if is_risen and decision.holder in self._pools:
            await self._pools[decision.holder].rise()
        return decision.look_again_at

    async def _hand_over(self, to: str, *, wakes: bool = True) -> None:
        """The pool `to` has the memory, and nobody else.

        Cancelled or failing half way it has told nobody of a turn, and is done again.
        """
        began_at, last = self._clock(), self._turns.holder
        async with asyncio.TaskGroup() as resting:
            for name, pool in self._pools.items():
                if name != to:
                    resting.create_task(pool.rest(self._hurry))
        self._turns.begin(to, self._clock())
        if to in self._pools:
            self._pools[to].may_start.set()
            if wakes:
                await self._pools[to].rise()
        if to != last:
            took_s = self._clock() - began_at
            logger.info("pool %s has the memory after %s, within %.3f s", to, last, took_s)

    @property
    def _is_syncing(self) -> bool:
        return self._host in self._pools and self._pools[self._host].sync.is_syncing

    @asynccontextmanager
    async def _claimed(self, timeout_s: float) -> AsyncGenerator[None]:
        """For the trainer, who waits for nobody's start."""
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
                f"pool {self._turns.holder} did not give the memory that it shares with "
                f"{self._host} back within {timeout_s:.3g} s"
            ) from None
        try:
            yield
        finally:
            self._lock.release()
            self._changed.set()
