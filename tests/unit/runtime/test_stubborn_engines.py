"""Engines that outlive SIGKILL, as one does that hangs in a driver."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
from local_rings import LocalRings

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_stop import JobStop
from umbra.runtime.actor.supervised_actor import NodeSettings, SupervisedActor
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.pools import engine_pool
from umbra.runtime.pools.engine_pool import EnginePool
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.weights.transports.shared_memory.memfd import serve_fds


def actor_that_never_ends(folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> SupervisedActor:
    """Its process is as one that was killed and is not gone."""
    supervisor = ActorRef(name="supervisor", incarnation=1, node_id="n", ipc_endpoint="ipc://none")
    node = NodeSettings(
        node_id="n",
        socket_dir=folder,
        log_dir=folder,
        supervisor=supervisor,
        tcp_host="",
        keys=(),
        log_level=20,
    )
    spec = ActorSpec(
        name="judge-0", target="umbra.engines.echo.echo_engine:EchoEngine", role="engine"
    )
    actor = SupervisedActor(
        spec, node, context, lambda _: None, lambda text, kind, who: None, JobStop()
    )
    actor.incarnation, actor.pid, actor.has_process = 3, 4711, True
    return actor


def test_a_killed_engine_that_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(engine_pool, "_END_LIMIT_S", 0.01)
    monkeypatch.setattr(engine_pool, "_GONE_LIMIT_S", 0.02)

    async def run(context: zmq.Context[zmq.Socket[bytes]]) -> None:
        spec = PoolSpec(name="judge", engine="echo", count=1, mode="standalone", load_weights=True)
        path = str(tmp_path / "fds")
        async with (
            Client("n", None) as client,
            serve_fds(path) as fds,
            asyncio.TaskGroup() as tasks,
        ):

            def note(text: str, kind: EventKind, who: str) -> None:
                notes.append(text)

            pool = EnginePool(spec, client, note, print, tasks, fds, LocalRings(fds))
            actor = actor_that_never_ends(tmp_path, context)
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

    with zmq.Context[zmq.Socket[bytes]]() as context:
        asyncio.run(run(context))
