"""Which rank and engine is on which GPUs: layouts one by one, then any job against what must
always hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from umbra.runtime.cluster.placement import Assignment, Node, Plan, PoolRequest, plan_placement
from umbra.runtime.errors import ConfigError


def node(num_gpus: int, num_ranks: int) -> Node:
    return Node(gpus=tuple(map(str, range(num_gpus))), num_ranks=num_ranks)


def policy(mode: Any = "hybrid", num_gpus: int = 1, **settings: Any) -> PoolRequest:
    return PoolRequest(name="policy", mode=mode, num_gpus=num_gpus, **settings)


def judge(mode: Any = "colocated", num_gpus: int = 1, **settings: Any) -> PoolRequest:
    host = "policy" if mode == "colocated" else ""
    return PoolRequest(name="judge", mode=mode, num_gpus=num_gpus, shares_with=host, **settings)


def gpus(plan: Plan, pool: str = "policy") -> list[tuple[int, ...]]:
    return [place.gpus for place in plan.engines[pool]]


@pytest.mark.parametrize(
    ("of_node", "pools", "expected"),
    [
        (node(2, 2), [policy()], {"policy": [(0,), (1,)]}),
        (node(8, 8), [policy(num_gpus=4)], {"policy": [(0, 1, 2, 3), (4, 5, 6, 7)]}),
        (node(8, 8), [policy(count=3)], {"policy": [(0,), (1,), (2,)]}),
        (node(2, 2), [policy("standalone", num_gpus=2, count=0)], {"policy": []}),
        (node(8, 2), [policy("standalone", num_gpus=2)], {"policy": [(2, 3), (4, 5), (6, 7)]}),
        (
            node(8, 2),
            [policy("standalone"), judge("standalone", 2, count=1)],
            {"policy": [(4,), (5,), (6,), (7,)], "judge": [(2, 3)]},
        ),
        (
            node(8, 4),
            [judge(num_gpus=2), policy("standalone")],
            {"policy": [(4,), (5,), (6,), (7,)], "judge": [(4, 5), (6, 7)]},
        ),
        (
            node(4, 0),
            [policy("hybrid"), judge("standalone", count=1)],
            {"policy": [(1,), (2,), (3,)], "judge": [(0,)]},
        ),
        (node(2, 0), [policy(), judge("standalone")], {"policy": [(1,)], "judge": [(0,)]}),
        (
            node(4, 1),
            [policy("standalone"), judge("standalone")],
            {"policy": [(2,), (3,)], "judge": [(1,)]},
        ),
        (
            node(4, 2),
            [policy("standalone"), judge(gpus=(3, 3))],
            {"policy": [(2,), (3,)], "judge": [(3,), (3,)]},
        ),
        (node(1, 1), [policy("standalone", gpus=(0, 0))], {"policy": [(0,), (0,)]}),
        (
            node(4, 1),
            [policy("standalone"), judge("standalone", gpus=(2,))],
            {"policy": [(1,), (3,)], "judge": [(2,)]},
        ),
    ],
    ids=[
        "hybrid engines are on the ranks' GPUs",
        "a tensor-parallel engine has neighbouring GPUs",
        "a number of engines leaves the other GPUs to the ranks",
        "a pool without engines on these nodes",
        "standalone engines are on GPUs without ranks",
        "a pool with a number comes before one that gets the rest",
        "a colocated judge is on the GPUs of its host",
        "without ranks on GPUs all are for engines",
        "the first pool without a number gets what the others leave",
        "and beside ranks",
        "a colocated pool chooses among the GPUs of its host",
        "GPUs by hand override the mode and may be shared",
        "other pools avoid GPUs that were chosen by hand",
    ],
)
def test_where_the_engines_of_one_node_are(
    of_node: Node, pools: list[PoolRequest], expected: dict[str, list[tuple[int, ...]]]
) -> None:
    plan = plan_placement([of_node], pools)

    assert {name: gpus(plan, name) for name in plan.engines} == expected
    assert plan.num_gpus == {pool.name: pool.num_gpus for pool in pools}
    assert [rank.gpus for rank in plan.ranks] == [(idx,) for idx in range(of_node.num_ranks)]


def test_a_pool_stays_on_the_nodes_that_were_chosen() -> None:
    nodes = [node(2, 1), node(2, 1), node(4, 1)]
    pools = [policy("standalone", nodes=(0, 2)), judge("standalone", nodes=(1,), gpus=(0, 1))]

    plan = plan_placement(nodes, pools)

    assert plan.engines["policy"] == (
        Assignment(node=0, gpus=(1,)),
        *(Assignment(node=2, gpus=(gpu,)) for gpu in (1, 2, 3)),
    )
    assert plan.engines["judge"] == tuple(Assignment(node=1, gpus=(gpu,)) for gpu in (0, 1))


def test_an_engine_larger_than_a_node_takes_whole_nodes_of_one_size() -> None:
    nodes = [node(4, 1), node(4, 0), node(2, 0), node(4, 0), node(4, 0), node(4, 0)]
    pools = [policy("standalone", num_gpus=8, count=2)]

    plan = plan_placement(nodes, pools)

    places = plan.engines["policy"]
    assert [[part.node for part in place.parts] for place in places] == [[1, 3], [4, 5]]
    assert {part.gpus for place in places for part in place.parts} == {(0, 1, 2, 3)}
    assert plan.table() == [
        "node  GPUs  ranks  engines",
        "0     0     0      -",
        "0     1-3   -      -",
        "1     0-3   -      policy-0",
        "2     0-1   -      -",
        "3     0-3   -      policy-0.1",
        "4     0-3   -      policy-1",
        "5     0-3   -      policy-1.1",
    ]


def test_on_the_cpu_the_chosen_nodes_take_turns() -> None:
    plan = plan_placement([node(0, 0)] * 3, [policy(num_gpus=0, nodes=(2, 1), count=3)])

    assert [place.node for place in plan.engines["policy"]] == [2, 1, 2]


def test_on_the_cpu_a_pool_has_one_engine_or_as_many_as_set() -> None:
    pools = [policy(num_gpus=0), judge(num_gpus=0, count=3)]

    plan = plan_placement([node(0, 0)], pools)

    assert [len(plan.engines[name]) for name in ("policy", "judge")] == [1, 3]
    assert plan.table() == []


def test_a_process_sees_its_own_gpus_first_in_the_form_that_the_job_was_given() -> None:
    names = ("GPU-b", "GPU-a", "GPU-d", "GPU-c")

    plan = plan_placement([Node(gpus=names, num_ranks=4)], [policy(num_gpus=2)])

    first, second = plan.engine_gpus("policy")
    assert (first.own, second.own) == (("GPU-b", "GPU-a"), ("GPU-d", "GPU-c"))
    assert first.visible == "GPU-b,GPU-a,GPU-d,GPU-c"
    assert second.visible == "GPU-d,GPU-c,GPU-b,GPU-a"


@pytest.mark.parametrize(
    ("nodes", "pools", "said"),
    [
        (
            [node(2, 2)],
            [policy(num_gpus=2, count=2)],
            "pool 'policy': its engines need 2 x 2 GPUs, and the ranks' GPUs are 2 in number, "
            "enough for 1: lower count, or lower the tensor-parallel size, or set gpus to share "
            "GPUs by hand$",
        ),
        ([node(3, 2)], [policy(count=3)], "lower count, or start more ranks .*, or set gpus to"),
        (
            [node(1, 1)],
            [policy("standalone")],
            "pool 'policy': its engines need 1 x 1 GPUs, and the GPUs left by the ranks are 0 "
            "in number, enough for 0: set gpus to share GPUs by hand$",
        ),
        (
            [node(2, 2)],
            [policy("standalone")],
            "enough for 0: start fewer ranks \\(job.trainer_gpus_per_node\\), or set gpus to share",
        ),
        (
            [node(2, 1)],
            [policy("standalone"), judge("standalone", count=1)],
            "'policy': .* the GPUs left by the ranks and pool 'judge' are 0 .* 0: set gpus to",
        ),
        (
            [node(2, 0)],
            [policy(count=2), judge("standalone", 2)],
            "'judge': .* 1 x 2 GPUs, and the GPUs left by pool 'policy' are 0 in number, enough "
            "for 0: lower the tensor-parallel size, or set gpus",
        ),
        (
            [node(3, 3), node(3, 3)],
            [policy(num_gpus=4)],
            "need 4 GPUs, more than a node has, and are no multiple of the 3 that one has",
        ),
        (
            [node(4, 2), node(4, 2)],
            [policy("standalone", num_gpus=8)],
            "need 1 x 8 GPUs, and the GPUs left by the ranks are 2 \\+ 2 in number, enough for 0",
        ),
        (
            [node(2, 0)] * 2,
            [policy("standalone", num_gpus=4, gpus=(0, 1))],
            "more than a node has, so each takes all GPUs of several nodes: remove gpus",
        ),
        (
            [node(2, 2)] * 2,
            [policy(), judge(num_gpus=4)],
            "'judge': .* several nodes are not time-sliced .*: set mode to 'standalone'",
        ),
        (
            [node(2, 2)] * 2,
            [policy(num_gpus=4), judge()],
            "'judge': .* engines of pool 'policy' are on several nodes .*: set mode to 'standal",
        ),
        (
            [node(4, 2)],
            [policy("standalone"), judge(num_gpus=4)],
            "'judge': .* 1 x 4 GPUs, and the GPUs of pool 'policy' are 2 .* 'standalone'$",
        ),
        (
            [node(4, 2)],
            [policy("standalone"), judge(gpus=(1,))],
            "'judge': gpus has 1, and the engines of pool 'policy', .* are on \\[2, 3\\]: name",
        ),
        (
            [node(2, 2), node(2, 2)],
            [policy(count=3, nodes=(1,))],
            "the ranks' GPUs on nodes \\[1\\] are 0 \\+ 2 .*: lower count, or name more nodes",
        ),
        ([node(2, 2)], [policy(nodes=(1,))], "nodes has 1, and the job has 1 node: use numbers"),
        ([node(2, 2)] * 2, [policy(nodes=(1, 1))], "a node twice in \\[1, 1\\]: name each once"),
        ([node(2, 2)], [policy(gpus=(0, 2))], "gpus has 2, and a node has 2 GPUs"),
        ([node(2, 2)], [policy(gpus=(1, 1), num_gpus=2)], "one engine the GPUs \\[1, 1\\]"),
        ([node(4, 4)], [policy(gpus=(0, 1, 2), num_gpus=2)], "gpus names 3, and its .* have 2"),
        (
            [node(2, 2)],
            [policy(gpus=(0, 1), count=3)],
            "need 3 x 1 .* those in gpus are 2 in .*: lower count, or name more GPUs in gpus$",
        ),
        (
            [node(2, 2)],
            [policy(gpus=(0,), num_gpus=0)],
            "engines are on the CPU: remove gpus, or set device = 'cuda'",
        ),
        ([node(1, 2)], [policy()], "2 ranks are on a node with 1 GPU, .* train.device = 'cpu'"),
    ],
)  # fmt: skip
def test_a_plan_without_a_place_for_all_names_the_numbers(
    nodes: list[Node], pools: list[PoolRequest], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_placement(nodes, pools)


# -- any job -----------------------------------------------------------------------------

Job = tuple[list[Node], list[PoolRequest]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Nodes and pools; not all have a plan."""
    nodes: list[Node] = []
    for _ in range(draw(st.integers(1, 4))):
        num_gpus = draw(st.integers(0, 8))
        nodes.append(node(num_gpus, draw(st.integers(0, num_gpus))))

    def pool(name: str, mode: Any, host: str = "") -> PoolRequest:
        return PoolRequest(
            name=name,
            mode=mode,
            num_gpus=draw(st.sampled_from((0, 1, 1, 2, 3, 4, 8, 16))),
            count=draw(st.none() | st.integers(1, 6)),
            nodes=draw(st.just(()) | st.sets(st.integers(0, len(nodes) - 1)).map(tuple)),
            gpus=draw(st.just(()) | st.lists(st.integers(0, 7), max_size=4).map(tuple)),
            shares_with=host,
        )

    pools = [pool("policy", draw(st.sampled_from(("hybrid", "standalone"))))]
    for idx in range(draw(st.integers(0, 2))):
        is_colocated = draw(st.booleans())
        mode = "colocated" if is_colocated else "standalone"
        pools.append(pool(f"aux{idx}", mode, "policy" if is_colocated else ""))
    return nodes, pools


@st.composite
def feasible_jobs(draw: st.DrawFn) -> Job:
    """One node with exactly the GPUs that its ranks and engines need."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    is_on_ranks = draw(st.booleans())
    num_ranks = size * count if is_on_ranks else draw(st.integers(0, 3))
    mode = "hybrid" if is_on_ranks or not num_ranks else "standalone"
    free = 0 if is_on_ranks else size * count

    def number(count: int) -> int | None:
        return draw(st.sampled_from((None, count)))

    pools = [policy(mode, size, count=number(count))]
    for idx in range(draw(st.integers(0, 3))):
        own_size = draw(st.integers(1, size * count))
        if draw(st.booleans()):
            num_engines = size * count // own_size
            choice = draw(st.permutations(range(size * count)))[: num_engines * own_size]
            by_hand = is_on_ranks and draw(st.booleans())
            pool = judge("colocated", own_size, gpus=tuple(choice) if by_hand else ())
        else:
            num_engines = draw(st.integers(1, 3))
            first = num_ranks + free
            free += num_engines * own_size
            by_hand = draw(st.booleans())
            choice = draw(st.permutations(range(first, num_ranks + free)))
            pool = judge("standalone", own_size, gpus=tuple(choice) if by_hand else ())
        pools.append(replace(pool, name=f"aux{idx}", count=number(num_engines)))
    return [node(num_ranks + free, num_ranks)], pools


def planned(job: Job) -> Plan:
    try:
        return plan_placement(*job)
    except ConfigError:
        assume(False)
        raise


def engines_by_gpu(places: dict[str, tuple[Assignment, ...]]) -> Counter[tuple[int, int]]:
    return Counter(
        (part.node, gpu)
        for engines in places.values()
        for place in engines
        for part in place.parts
        for gpu in part.gpus
    )


@given(feasible_jobs())
def test_a_job_that_fits_on_a_node_is_planned(job: Job) -> None:
    _, pools = job

    plan = plan_placement(*job)

    for pool in pools:
        places = plan.engines[pool.name]
        assert len(places) == pool.count if pool.count else len(places) >= 1
        if pool.gpus:
            used = [gpu for place in places for gpu in place.gpus]
            assert used == list(pool.gpus[: len(used)])
    standalone = {pool.name: plan.engines[pool.name] for pool in pools if pool.mode == "standalone"}
    assert set(engines_by_gpu(standalone).values()) <= {1}
    assert not {(0, rank.gpus[0]) for rank in plan.ranks} & engines_by_gpu(standalone).keys()


@given(jobs() | feasible_jobs())
def test_no_gpu_is_oversubscribed_unless_gpus_says_so(job: Job) -> None:
    nodes, pools = job
    plan = planned(job)

    modes = {pool.name: pool.mode for pool in pools if not pool.gpus}
    permanent = {name: plan.engines[name] for name in modes if modes[name] == "standalone"}
    time_sliced = {name: plan.engines[name] for name in modes if modes[name] != "standalone"}
    by_hand = {
        pool.name: plan.engines[pool.name]
        for pool in pools
        if pool.gpus and pool.mode != "colocated"
    }
    ranks = {(rank.node, rank.gpus[0]) for rank in plan.ranks}

    always_used = engines_by_gpu(permanent)
    assert not ranks & always_used.keys()
    assert not engines_by_gpu(by_hand).keys() & always_used.keys()
    assert set(always_used.values()) <= {1}
    for name, engines in time_sliced.items():  # one of them is awake at a time
        used = engines_by_gpu({name: engines})
        assert set(used.values()) <= {1}
        hosts = permanent.keys() & {pool.shares_with for pool in pools if pool.name == name}
        own = engines_by_gpu({host: permanent[host] for host in hosts})
        assert not used.keys() & (always_used.keys() - own.keys())
    assert all(gpu < len(nodes[n].gpus) for n, gpu in always_used)


@given(jobs() | feasible_jobs())
def test_every_rank_and_engine_has_a_place(job: Job) -> None:
    nodes, pools = job
    plan = planned(job)

    assert len(plan.ranks) == sum(node.num_ranks for node in nodes)
    assert list(plan.engines) == [pool.name for pool in pools]
    by_hand = {pool.name for pool in pools if pool.gpus}  # a guest has the order of its host
    for pool in pools:
        places = plan.engines[pool.name]
        assert len(places) == pool.count if pool.count else len(places) > 0
        parts = [part for place in places for part in place.parts]
        assert all(sum(len(part.gpus) for part in place.parts) == pool.num_gpus for place in places)
        assert all(
            len(part.gpus) == len(nodes[part.node].gpus) == len(place.gpus)
            for place in places
            for part in place.parts
            if place.followers
        )
        chosen = pool.nodes or range(len(nodes))
        assert {part.node for part in parts} <= set(chosen)
        if pool.num_gpus == 0:  # the nodes take turns
            turns = [chosen[i % len(chosen)] for i in range(len(places))]
            assert [place.node for place in places] == turns
        elif by_hand.isdisjoint((pool.name, pool.shares_with)):
            assert list(places) == sorted(places, key=lambda place: (place.node, place.gpus))


@given(jobs(), st.integers(1, 5))
def test_more_engines_move_no_other_engine_of_the_pool(job: Job, count: int) -> None:
    nodes, pools = job
    fewer = planned((nodes, [replace(pools[0], count=count)]))
    more = planned((nodes, [replace(pools[0], count=count + 1)]))

    assert more.engines["policy"][:count] == fewer.engines["policy"]


@given(st.integers(1, 4), st.integers(1, 8), st.sampled_from((1, 2, 4, 8)))
def test_auto_fills_every_node(num_nodes: int, num_gpus: int, size: int) -> None:
    assume(size <= num_gpus)

    plan = plan_placement([node(num_gpus, num_gpus)] * num_nodes, [policy(num_gpus=size)])

    assert len(plan.engines["policy"]) == num_nodes * (num_gpus // size)


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 8))
def test_auto_fills_all_nodes_with_engines_on_several(
    num_engines: int, num_parts: int, num_gpus: int
) -> None:
    nodes = [node(num_gpus, num_gpus)] * (num_engines * num_parts)

    plan = plan_placement(nodes, [policy(num_gpus=num_parts * num_gpus)])

    assert [len(place.parts) for place in plan.engines["policy"]] == [num_parts] * num_engines
    assert set(engines_by_gpu({"policy": plan.engines["policy"]}).values()) == {1}
