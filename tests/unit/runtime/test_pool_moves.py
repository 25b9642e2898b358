"""How long a pool's operation may take an engine."""

from __future__ import annotations

import asyncio

import pytest
from local_images import LocalImages

from umbra.runtime.engine_api.lifecycle import EngineLifecycle, EngineStarted
from umbra.runtime.pools import engine_pool
from umbra.runtime.pools.engine_pool import EnginePool
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.weights.transports.shared_memory.fd_server import FdServer


class LongDrain(PoolEngine):
    """Serves, without a process, and is paused after `drain_s`."""

    drain_s = 0.2

    def __init__(self) -> None:
        self.lifecycle = EngineLifecycle().apply(EngineStarted(0))
        self.reasons: list[str] = []

    @property
    def incarnation(self) -> int:
        return 1

    async def pause(self, mode: str, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(self.drain_s)

    def kill(self, reason: str) -> None:
        self.reasons.append(reason)


async def drain(engine: LongDrain, timeout_s: float) -> None:
    spec = PoolSpec(name="policy", engine="umbra.engines.echo.echo_engine:EchoEngine", count=1)
    async with Client("node") as client, asyncio.TaskGroup() as tasks:
        fds = FdServer("")
        pool = EnginePool(spec, client, print, print, tasks, fds, LocalImages(fds))
        pool.engines["policy-0"] = engine
        await pool.pause("drain", timeout_s)


def test_an_engine_may_drain_as_long_as_who_asks_for_it_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_pool, "_SETTLE_TIMEOUT_S", 0.05)
    engine = LongDrain()

    asyncio.run(drain(engine, timeout_s=30.0))

    assert engine.reasons == []
