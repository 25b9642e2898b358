"""Sizes of KV caches, and whether processes fit their GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.runtime.cluster.memory_plan import (
    GIB,
    EngineNeed,
    MemoryPlan,
    RankNeed,
    plan_memory,
)
from umbra.runtime.cluster.placement import Node, Plan, PoolMode, PoolRequest, plan_placement
from umbra.runtime.engine_api.lifecycle import Tag
from umbra.runtime.errors import ConfigError

GPU = 100 * GIB
USABLE = 96 * GIB  # of it, by KV caches
MIB = 1 << 20
RANK = RankNeed(
    context_nbytes=2 * GIB,
    sync_nbytes=30 * GIB,
    generation_nbytes=30 * GIB,
    training_nbytes=40 * GIB,
    activations_nbytes=20 * GIB,
    keeps_cache=False,
)
ENGINE = EngineNeed(
    mode="hybrid",
    shares_with="",
    is_updated=True,
    weights_nbytes=8 * GIB,
    kv_token_nbytes=MIB,
    overhead_nbytes=2 * GIB,
    asleep_nbytes=GIB,
    kv_num_tokens=None,
    least_kv_num_tokens=1024,
    most_kv_num_tokens=1 << 30,
)


def need(mode: PoolMode = "hybrid", **changes: Any) -> EngineNeed:
    is_colocated = mode == "colocated"
    host = "policy" if is_colocated else ""
    return replace(ENGINE, mode=mode, shares_with=host, is_updated=not is_colocated, **changes)


def placed(
    num_gpus: int, num_ranks: int, engines: dict[str, EngineNeed], **requests: dict[str, Any]
) -> Plan:
    pools = [
        PoolRequest(
            name=name,
            mode=engine.mode,
            num_gpus=1,
            shares_with=engine.shares_with,
            **requests.get(name, {}),
        )
        for name, engine in engines.items()
    ]
    gpus = tuple(map(str, range(num_gpus)))
    return plan_placement([Node(gpus=gpus, num_ranks=num_ranks)], pools)


def planned(
    num_gpus: int,
    num_ranks: int,
    engines: dict[str, EngineNeed],
    rank: RankNeed = RANK,
    **requests: dict[str, Any],
) -> MemoryPlan:
    plan = placed(num_gpus, num_ranks, engines, **requests)
    return plan_memory(plan, [[GPU] * num_gpus], rank if num_ranks else None, engines)


def gib(memory: MemoryPlan, gpu: int = 0) -> dict[str, float]:
    return {phase: by_gpu[0, gpu] / GIB for phase, by_gpu in memory.expected_nbytes.items()}


def test_a_hybrid_engine_gets_what_the_rank_leaves_while_it_generates() -> None:
    memory = planned(1, 1, {"policy": need()})

    assert memory.kv_num_tokens == {"policy": (USABLE - (30 + 8 + 2) * GIB) // MIB}
    assert gib(memory) == {"sync": 30 + 8 + 2, "generation": 96, "train": 40 + 20 + 1}
    assert memory.notes == ("an engine of pool policy has a KV cache of 57344 tokens",)


def test_engines_on_other_gpus_have_contexts_on_each_ranks_gpu() -> None:
    memory = planned(3, 3, {"policy": need()})

    assert gib(memory) == gib(memory, 2)
    assert gib(memory)["train"] == 40 + 20 + 1 + 2 * 0.625
    assert memory.kv_num_tokens == {"policy": (USABLE - 40 * GIB - 2 * 640 * MIB) // MIB}


def test_a_cache_does_not_get_what_offloading_frees() -> None:
    """Ranks that resume hold everything while engines start."""
    memory = planned(1, 1, {"policy": need()}, replace(RANK, generation_nbytes=GIB))

    assert memory.kv_num_tokens == planned(1, 1, {"policy": need()}).kv_num_tokens
    assert gib(memory)["generation"] == 96 - 29


def test_a_cache_that_the_user_chose_may_use_what_offloading_frees() -> None:
    away = replace(RANK, generation_nbytes=GIB)

    memory = planned(1, 1, {"policy": need(kv_num_tokens=80_000)}, away)

    assert memory.kv_num_tokens == {"policy": 80_000}


def test_a_cache_is_never_larger_than_all_sequences_and_a_chosen_one_stays() -> None:
    bounded = planned(1, 1, {"policy": need(most_kv_num_tokens=5000)})
    chosen = planned(1, 1, {"policy": need(kv_num_tokens=300)})

    assert bounded.kv_num_tokens == {"policy": 5000}
    assert chosen.kv_num_tokens == {"policy": 300}


def test_engines_on_one_gpu_share_it_and_a_pool_goes_by_its_fullest_gpu() -> None:
    engines = {"policy": need("standalone"), "other": need("standalone")}

    memory = planned(2, 0, engines, policy={"gpus": (0, 0, 1)}, other={"gpus": (1,)})

    # GPU 0 has two engines of policy, GPU 1 one of each.
    share = (USABLE - 2 * 10 * GIB) // 2 // MIB
    assert memory.kv_num_tokens == {"policy": share, "other": share}
    alone = planned(2, 0, engines, policy={"gpus": (0, 0)}, other={"gpus": (1,)})
    assert alone.kv_num_tokens == {"policy": share, "other": (USABLE - 10 * GIB) // MIB}


def test_a_colocated_pool_has_the_gpu_while_its_host_sleeps() -> None:
    memory = planned(1, 1, {"policy": need(), "judge": need("colocated", weights_nbytes=20 * GIB)})

    assert memory.kv_num_tokens == {
        "policy": (USABLE - (30 + 10 + 1) * GIB) // MIB,
        "judge": (USABLE - (30 + 22 + 1) * GIB) // MIB,
    }
    assert gib(memory)["colocated"] == gib(memory)["generation"] == 96
    assert gib(memory)["train"] == 40 + 20 + 1 + 1


def test_a_standalone_host_sleeps_for_its_colocated_pool_but_other_pools_do_not() -> None:
    engines = {"policy": need("standalone"), "judge": need("colocated"), "user": need("standalone")}

    memory = planned(2, 0, engines, policy={"gpus": (0,)}, user={"gpus": (1,)})

    assert memory.kv_num_tokens["policy"] == memory.kv_num_tokens["judge"]
    assert gib(memory) == {"generation": 96, "colocated": 96}
    assert gib(memory, 1) == {"generation": 96, "colocated": 96}


def test_standalone_engines_have_their_gpus_all_the_time() -> None:
    memory = planned(2, 1, {"policy": need("standalone")})

    assert gib(memory, 0) == {"sync": 30.625, "generation": 30.625, "train": 60.625}
    assert gib(memory, 1) == {"sync": 96, "generation": 96, "train": 96}


@pytest.mark.parametrize(
    ("sleeps", "sync", "train"),
    [
        ("kv_cache weights", 30 + 10, 40 + 20 + 1),
        ("kv_cache", 30 + 10, 40 + 20 + 10),
        ("weights", 30 + 10 + 2, 40 + 20 + 2 + 2),
        ("", 30 + 10 + 2, 40 + 20 + 10 + 2),
    ],
)
def test_parts_that_do_not_sleep_are_there_in_training_and_syncs(
    sleeps: str, sync: int, train: int
) -> None:
    tags = frozenset(cast("list[Tag]", sleeps.split()))

    memory = planned(1, 1, {"policy": need(kv_num_tokens=2048, sleeps=tags)})

    assert gib(memory) == {"sync": sync, "generation": 30 + 10 + 2, "train": train}
    assert memory.activations_fit
    assert memory.training_nbytes == (60 - 2) * GIB


def test_a_cache_that_stays_leaves_a_tenth_of_the_gpu_beside_training() -> None:
    memory = planned(1, 1, {"policy": need(sleeps=frozenset())})
    assert memory.kv_num_tokens["policy"] == (90 - 60 - 10) * 1024

    tight = {"policy": need(kv_num_tokens=20 * 1024 + 1, sleeps=frozenset())}
    memory = planned(1, 1, tight)
    assert not memory.activations_fit
    assert memory.notes[-1].endswith("and pool.sleep 'auto' or 'all'")


@pytest.mark.parametrize(
    ("sleeps", "most_gib", "logits_gib", "kept_gib"),
    [
        ("weights kv_cache", 100, 29, 29),  # the rank 60, an engine asleep 1: a tenth stays free
        ("weights kv_cache", 100, 29.1, 0),
        ("", 10, 10, 10),  # an engine awake 10, its cache
        ("", 10, 10.1, 0),  # the cache would be smaller
    ],
)
def test_logits_are_kept_in_memory_that_nothing_else_would_take(
    sleeps: str, most_gib: int, logits_gib: float, kept_gib: float
) -> None:
    tags = frozenset(cast("list[Tag]", sleeps.split()))
    engines = {"policy": need(sleeps=tags, most_kv_num_tokens=most_gib * 1024)}
    plain = planned(1, 1, engines)

    memory = planned(1, 1, engines, replace(RANK, logits_nbytes=int(logits_gib * GIB)))

    assert memory.logits_nbytes == int(kept_gib * GIB)
    assert memory.training_nbytes == plain.training_nbytes + memory.logits_nbytes
    assert memory.kv_num_tokens == plain.kv_num_tokens
    assert memory.activations_fit
    assert gib(memory)["train"] == gib(plain)["train"] + kept_gib


def test_what_training_took_stays_with_ranks_that_keep_it() -> None:
    memory = planned(2, 1, {"policy": need("standalone")}, replace(RANK, keeps_cache=True))

    assert set(gib(memory, 0).values()) == {60.625}


def test_a_standalone_engine_beside_a_rank_leaves_room_for_its_activations() -> None:
    memory = planned(1, 1, {"policy": need("standalone")}, policy={"gpus": (0,)})

    assert gib(memory)["train"] == 96
    assert memory.kv_num_tokens == {"policy": (USABLE - (40 + 20 + 10) * GIB) // MIB}


def test_pools_of_unknown_needs_count_as_nothing() -> None:
    plan = placed(1, 1, {"policy": need()})

    memory = plan_memory(plan, [[GPU]], RANK, {})

    assert memory.kv_num_tokens == {}
    assert gib(memory)["generation"] == 30


def test_a_cache_that_does_not_fit_is_an_error_with_the_numbers() -> None:
    message = (
        r"GPU 0 has 100.0 GiB, and generation needs 121.0 GiB \(the rank 30.0, policy-0 10.0, "
        r"policy-0's KV cache of 81920 tokens 80.0, judge-0 asleep 1.0\): lower "
        "kv_cache_num_tokens, or give each engine more GPUs"
    )
    engines = {"policy": need(kv_num_tokens=81920), "judge": need("colocated")}
    with pytest.raises(ConfigError, match=message):
        planned(1, 1, engines)


def test_one_sequence_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"of 70000 tokens 68\.4\): lower max_context_len, or"):
        planned(1, 1, {"policy": need(least_kv_num_tokens=70000)})


def test_training_that_does_not_fit_without_activations_is_an_error() -> None:
    remedies = "give the engines GPUs without ranks, or train on more GPUs"
    with pytest.raises(ConfigError, match=rf"and train needs 111\.0 GiB .*: {remedies}"):
        planned(1, 1, {"policy": need()}, replace(RANK, training_nbytes=110 * GIB))


def test_activations_that_may_not_fit_are_one_warning() -> None:
    memory = planned(2, 2, {"policy": need()}, replace(RANK, activations_nbytes=70 * GIB))

    _, warning = memory.notes
    assert "training may need 111.6 GiB" in warning
    assert "activations, at most, 70.0" in warning
    assert "train.max_tokens_per_micro_batch" in warning


def test_the_table_has_what_is_expected_and_seen() -> None:
    engines = {"policy": need()}
    memory = planned(2, 2, engines, replace(RANK, activations_nbytes=0))

    table = placed(2, 2, engines).table(
        memory.columns({"train": {(0, 0): 42 * GIB, (0, 1): 43 * GIB}})
    )

    assert table == [
        "GPUs  ranks  engines   sync GiB  generation GiB  train GiB",
        "0     0      policy-0  40.6      96.0            41.6 (42.0)",
        "1     1      policy-1  40.6      96.0            41.6 (43.0)",
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from(["hybrid", "standalone"]),
    st.booleans(),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_caches_take_all_that_is_free_and_no_more(
    num_gpus: int, mode: PoolMode, has_judge: bool, rank_gib: int, weights_gib: int
) -> None:
    rank = replace(RANK, sync_nbytes=rank_gib * GIB, generation_nbytes=rank_gib * GIB)
    engines = {"policy": need(mode, weights_nbytes=weights_gib * GIB)}
    if has_judge:
        engines["judge"] = need("colocated", weights_nbytes=weights_gib * GIB)
    try:
        memory = planned(num_gpus, num_gpus, engines, rank, policy={"gpus": range(num_gpus)})
    except ConfigError:
        return
    for pool, size in memory.kv_num_tokens.items():
        if size > ENGINE.least_kv_num_tokens:
            own = [
                memory.expected_nbytes[phase][0, 0]
                for phase in memory.expected_nbytes
                if phase == ("colocated" if pool == "judge" else "generation")
                or (mode == "standalone" and pool == "policy" and phase != "colocated")
            ]
            assert USABLE - MIB <= max(own) <= USABLE


def test_an_engine_on_two_nodes_takes_memory_of_both() -> None:
    node = Node(gpus=("0", "1"), num_ranks=0)
    pool = PoolRequest(name="policy", mode="standalone", num_gpus=4)
    plan = plan_placement([node, node], [pool])
    sizes = [[GPU, GPU], [GPU, GPU // 2]]  # the last GPU decides for all

    memory = plan_memory(plan, sizes, None, {"policy": need("standalone")})

    assert memory.kv_num_tokens == {"policy": (USABLE // 2 - 10 * GIB) // MIB}
    expected = memory.expected_nbytes["generation"]
    assert sorted(expected) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert set(expected.values()) == {USABLE // 2}
