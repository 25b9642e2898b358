"""Engines that outlive SIGKILL, as one does that hangs in a driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from local_actors import actor_without_process, lone_node
from local_images import LocalImages

from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.pools import engine_pool
from umbra.runtime.pools.engine_pool import EnginePool
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.weights.image.fd_server import serve_fds


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
