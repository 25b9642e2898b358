"""When a pool connects to its engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from local_actors import actor_without_process

from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.rpc.envelopes import ActorRef
from umbra.runtime.rpc.rpc_client import Client


def test_an_engine_is_connected_before_the_first_call_to_it(tmp_path: Path) -> None:
    async def run(context: zmq.Context[zmq.Socket[bytes]]) -> None:
        endpoint = f"ipc://{tmp_path}/engine"
        actor = actor_without_process(tmp_path, context)
        actor.state = ActorState.RUNNING
        actor.ref = ActorRef(name="judge-0", incarnation=1, node_id="n", ipc_endpoint=endpoint)
        with context.socket(zmq.ROUTER) as listener:
            listener.bind(endpoint)
            async with Client("n", None) as client:
                PoolEngine(actor, client, lambda engine: None).follow_actor()

                assert await asyncio.to_thread(listener.poll, 5000), "nobody has connected"

    with zmq.Context[zmq.Socket[bytes]]() as context:
        asyncio.run(run(context))
