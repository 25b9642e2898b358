from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.pools.job_pools import JobPools
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.settings import from_wire

if TYPE_CHECKING:
    from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag


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
        await self._pools.pause(name, mode, timeout_s)

    async def pool_resume(self, name: str, timeout_s: float) -> None:
        await self._pools.resume(name, timeout_s)

    async def pool_sleep(
        self, name: str, level: SleepLevel, tags: list[Tag], timeout_s: float
    ) -> None:
        await self._pools.sleep(name, level, tags, timeout_s)

    async def pool_wake(self, name: str, tags: list[Tag], timeout_s: float) -> None:
        await self._pools.wake(name, tags, timeout_s)

    async def sync(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answers a rank's message of a weight sync; see `sync_messages`."""
        return await self._pools.sync(message)

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
