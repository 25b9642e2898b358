"""Engines that a pool takes over when the nodes of a job have met again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_runs import wire_request
from local_actors import actor_without_process, lone_node

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_rules import JobRules
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.errors import IllegalTransition
from umbra.runtime.pools.warm_engines import WarmEngines, reuse_engines
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import from_wire, to_wire


def engine(idx: int, gpu: str = "0", pool: str = "policy", **arguments: Any) -> ActorSpec:
    return ActorSpec(
        name=f"{pool}-{idx}",
        target="umbra.engines.echo.echo_engine:EchoEngine",
        kwargs={"num_threads": 1, "sizes": (1, 2), **arguments},
        role="engine",
        gpus=(gpu,),
    )


def on_the_wire(spec: ActorSpec) -> ActorSpec:
    return from_wire(ActorSpec, to_wire(spec))


def test_without_earlier_engines_all_are_started() -> None:
    planned = [engine(0), engine(1)]

    assert reuse_engines("policy", planned, (0, 1), {0: []}) == (planned, {})


def test_engines_of_the_nodes_that_are_left_keep_their_names() -> None:
    warm = {0: [engine(0)], 1: [on_the_wire(engine(2))]}  # node 1, which had policy-1, is lost

    engines, unused = reuse_engines("policy", [engine(0), engine(1)], (0, 1), warm)

    assert [spec.name for spec in engines] == ["policy-0", "policy-2"]
    assert unused == {}


def test_an_engine_is_found_on_its_node_and_gpu_only() -> None:
    warm = {0: [engine(4, gpu="1"), engine(7, gpu="0")], 1: [engine(5, gpu="1")]}

    engines, unused = reuse_engines("policy", [engine(0), engine(1, gpu="1")], (0, 0), warm)

    assert [(spec.name, spec.gpus) for spec in engines] == [
        ("policy-7", ("0",)),
        ("policy-4", ("1",)),
    ]
    assert unused == {1: ["policy-5"]}


def test_an_engine_with_other_settings_ends_and_its_successor_gets_a_new_name() -> None:
    warm = {0: [engine(0, kv_cache_num_tokens=100)]}

    engines, unused = reuse_engines("policy", [engine(0, kv_cache_num_tokens=200)], (0,), warm)

    assert engines == [engine(1, kv_cache_num_tokens=200)]  # policy-0 may still be ending
    assert unused == {0: ["policy-0"]}


def test_the_number_of_threads_does_not_end_an_engine() -> None:
    warm = {0: [replace(engine(0), kwargs={"num_threads": 8, "sizes": [1, 2]})]}

    engines, unused = reuse_engines("policy", [engine(0)], (0,), warm)

    assert ([spec.name for spec in engines], unused) == (["policy-0"], {})


def test_two_nodes_that_come_with_engines_of_one_name_keep_one_of_them() -> None:
    warm = {0: [engine(1)], 1: [engine(1)]}  # node 1 was lost, and its name given again

    engines, unused = reuse_engines("policy", [engine(0), engine(1)], (0, 1), warm)

    assert [spec.name for spec in engines] == ["policy-1", "policy-2"]
    assert unused == {1: ["policy-1"]}


def test_engines_of_other_pools_are_left_alone() -> None:
    warm = {0: [engine(0, pool="policy-judge")]}

    engines, unused = reuse_engines("policy", [engine(0)], (0,), warm)

    assert (engines, unused) == ([engine(0)], {})


def test_an_engine_runs_once_it_has_started_until_it_is_to_end(tmp_path: Path) -> None:
    with lone_node(tmp_path) as node:
        actor = actor_without_process(node)
        starts = actor.is_running
        actor.state = ActorState.RUNNING
        runs = actor.is_running
        actor.stop()

        assert (starts, runs, actor.is_running) == (False, True, False)


def test_an_engine_that_is_kept_is_awake_and_has_no_request_of_before(tmp_path: Path) -> None:
    async def keep(node: NodeContext, address: zmq.Socket[bytes]) -> None:
        echo = EchoEngine(tokens_per_s=1.0, load_weights=True)
        server = ActorServer([echo], 1)
        endpoint = server.bind(address, f"ipc://{tmp_path}/judge-0")
        actor = actor_without_process(node)
        actor.state = ActorState.RUNNING
        actor.ref = ActorRef(name="judge-0", incarnation=1, node_id="n", ipc_endpoint=endpoint)
        async with asyncio.timeout(30.0), node.client, asyncio.TaskGroup() as tasks, echo:
            serving = tasks.create_task(server.run())
            warm = WarmEngines(replace(node, rules=JobRules(nodes_may_change=True)))
            await echo.submit([wire_request(1, [1, 2])])
            await echo.pause("keep")
            await echo.sleep(1)

            await warm.keep([actor])

            with pytest.raises(IllegalTransition, match="is PAUSED"):
                await echo.submit([wire_request(2, [1, 2])])
            stats = await echo.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
            assert [spec.name for spec in warm.specs()] == ["judge-0"]
            serving.cancel()

    with lone_node(tmp_path) as node, node.sockets.socket(zmq.ROUTER) as address:
        asyncio.run(keep(node, address))
