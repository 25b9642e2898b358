"""Moves of a pool, of which an engine may not end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_actors import actor_without_process, lone_node
from local_images import LocalImages

from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.engine_api.lifecycle import EngineLifecycle
from umbra.runtime.errors import ConnectionLost
from umbra.runtime.pools import engine_pool
from umbra.runtime.pools.engine_pool import EnginePool
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.weights.image.fd_server import FdServer, serve_fds


class LongDrain(PoolEngine):
    """Serves, without a process, and is paused after `drain_s`."""

    drain_s = 0.2

    def __init__(self) -> None:
        self.lifecycle = EngineLifecycle().started(0)
        self.reasons: list[str] = []

    @property
    def name(self) -> str:
        return "policy-0"

    @property
    def incarnation(self) -> int:
        return 1

    async def pause(self, mode: str, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(self.drain_s)

    def kill(self, reason: str) -> None:
        self.reasons.append(reason)

    def describe(self) -> dict[str, Any]:
        return {"engine": "policy-0"}


async def drain(engine: LongDrain, folder: Path, timeout_s: float) -> None:
    spec = PoolSpec(name="policy", engine="umbra.engines.echo.echo_engine:EchoEngine", count=1)
    with lone_node(folder) as node:
        async with asyncio.TaskGroup() as tasks:
            fds = FdServer("")
            pool = EnginePool(spec, node, tasks, fds, LocalImages(fds))
            pool.engines["policy-0"] = engine
            await pool.pause("drain", timeout_s)


def test_an_engine_may_drain_as_long_as_who_asks_for_it_allows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_pool, "_SETTLE_TIMEOUT_S", 0.05)
    engine = LongDrain()

    asyncio.run(drain(engine, tmp_path, timeout_s=30.0))

    assert engine.reasons == []


def test_a_watcher_that_falls_behind_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "_MAX_UNREAD_CHANGES", 3)

    async def body(node: NodeContext) -> None:
        spec = PoolSpec(name="policy", engine="umbra.engines.echo.echo_engine:EchoEngine", count=1)
        engine = LongDrain()
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(10.0):
            fds = FdServer("")
            pool = EnginePool(spec, node, tasks, fds, LocalImages(fds))
            pool.engines["policy-0"] = engine
            changed = pool._on_engine_change  # pyright: ignore[reportPrivateUsage]
            slow, prompt = pool.watch(), pool.watch()
            for watcher in (slow, prompt):
                assert await anext(watcher) == {"engine": "policy-0"}
            for _ in range(4):
                changed(engine)
                await anext(prompt)

            with pytest.raises(ConnectionLost, match="3 changes of pool 'policy' were not read"):
                await anext(slow)
            changed(engine)
            assert await anext(prompt) == {"engine": "policy-0"}

    with lone_node(tmp_path) as node:
        asyncio.run(body(node))


def test_a_killed_engine_that_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(engine_pool, "_END_LIMIT_S", 0.01)
    monkeypatch.setattr(engine_pool, "_GONE_LIMIT_S", 0.02)

    async def run() -> None:
        spec = PoolSpec(name="judge", engine="echo", count=1, mode="standalone", load_weights=True)
        path = str(tmp_path / "fds")
        async with serve_fds(path) as fds, asyncio.TaskGroup() as tasks:

            def note(text: str, kind: EventKind, who: str) -> None:
                notes.append(text)

            pool = EnginePool(spec, replace(node, note=note), tasks, fds, LocalImages(fds))
            actor = actor_without_process(node)
            actor.incarnation, actor.pid, actor.has_process = 3, 4711, True  # killed, and not gone
            pool.add(actor)
            hurry = asyncio.Event()
            hurry.set()

            await pool.release_memory(hurry)
            (text,) = notes
            actor.has_process = False
            await pool.release_memory(hurry)

        assert text == (
            "judge-0#3 (pid 4711) was killed 0.02 s ago and still holds memory that pool judge "
            "shares with others; the next pool to wake may run out of memory"
        )
        assert notes == [text]

    with lone_node(tmp_path) as node:
        asyncio.run(run())
