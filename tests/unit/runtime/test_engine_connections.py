"""When a pool connects to its engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from local_actors import actor_without_process, lone_node

from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.rpc.wire import ActorRef


def test_an_engine_is_connected_before_the_first_call_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        endpoint = f"ipc://{tmp_path}/engine"
        actor = actor_without_process(node)
        actor.state = ActorState.RUNNING
        actor.ref = ActorRef(name="judge-0", incarnation=1, node_id="n", ipc_endpoint=endpoint)
        with node.sockets.socket(zmq.ROUTER) as listener:
            listener.bind(endpoint)
            async with node.client:
                PoolEngine(actor, node.client, lambda engine: None).follow_actor()

                assert await asyncio.to_thread(listener.poll, 5000), "nobody has connected"

    with lone_node(tmp_path) as node:
        asyncio.run(run())
