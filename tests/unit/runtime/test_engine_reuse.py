"""Engines that a pool takes over when the nodes of a job have met again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.pools.warm_engines import reuse_engines
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
