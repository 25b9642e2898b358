"""Sizes of KV caches, and whether processes fit their GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from umbra.runtime.errors import ConfigError

GPU = 100 * GIB
USABLE = 96 * GIB  # of it, by KV caches
MIB = 1 << 20
RANK = RankNeed(
    start_nbytes=10 * GIB,
    sync_nbytes=30 * GIB,
    generation_nbytes=30 * GIB,
    training_nbytes=40 * GIB,
    activations_nbytes=20 * GIB,
)
ENGINE = EngineNeed(
    mode="hybrid",
    weights_nbytes=8 * GIB,
    kv_token_nbytes=MIB,
    overhead_nbytes=2 * GIB,
    asleep_nbytes=GIB,
    kv_num_tokens=None,
    least_kv_num_tokens=1024,
    most_kv_num_tokens=1 << 30,
)


def need(mode: PoolMode = "hybrid", **changes: Any) -> EngineNeed:
    return replace(ENGINE, mode=mode, **changes)


def placed(
    num_gpus: int, num_ranks: int, engines: dict[str, EngineNeed], **requests: dict[str, Any]
) -> Plan:
    pools = [
        PoolRequest(
            name=name,
            mode=engine.mode,
            num_gpus=1,
            shares_with="policy" if engine.mode == "colocated" else "",
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
    memory = planned(2, 2, {"policy": need()})

    assert memory.kv_num_tokens == {"policy": (USABLE - (30 + 8 + 2) * GIB) // MIB}
    assert (
        gib(memory)
        == gib(memory, 1)
        == {
            "start": 10 + 8 + 2 + 56,
            "sync": 30 + 8 + 2,
            "generation": 96,
            "train": 40 + 20 + 1,
        }
    )
    assert not memory.warnings


def test_offloading_makes_room_only_up_to_what_the_start_needs() -> None:
    away = replace(RANK, generation_nbytes=GIB)

    memory = planned(1, 1, {"policy": need()}, away)

    assert memory.kv_num_tokens == {"policy": (USABLE - (10 + 8 + 2) * GIB) // MIB}
    assert gib(memory)["start"] == 96


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


def test_standalone_engines_have_their_gpus_all_the_time() -> None:
    memory = planned(2, 1, {"policy": need("standalone")})

    assert gib(memory, 0) == {"start": 10, "sync": 30, "generation": 30, "train": 60}
    assert gib(memory, 1) == dict.fromkeys(("start", "sync", "generation", "train"), 96)


def test_pools_of_unknown_needs_count_as_nothing() -> None:
    plan = placed(1, 1, {"policy": need()})

    memory = plan_memory(plan, [[GPU]], RANK, {})

    assert memory.kv_num_tokens == {}
    assert gib(memory)["generation"] == 30


def test_a_cache_that_does_not_fit_is_an_error_with_the_numbers() -> None:
    message = (
        r"GPU 0 has 100.0 GiB, and generation needs 121.0 GiB \(the rank 30.0, policy-0 "
        r"10.0, its KV cache of 81920 tokens 80.0, judge-0 asleep 1.0\): lower "
        "kv_cache_num_tokens"
    )
    engines = {"policy": need(kv_num_tokens=81920), "judge": need("colocated")}
    with pytest.raises(ConfigError, match=message):
        planned(1, 1, engines, replace(RANK, start_nbytes=0, sync_nbytes=0))


def test_one_sequence_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"KV cache of 70000 tokens 68\.4"):
        planned(1, 1, {"policy": need(least_kv_num_tokens=70000)})


def test_training_that_does_not_fit_without_activations_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"GPU 0 .*, and train needs 111.0 GiB .*more GPUs"):
        planned(1, 1, {"policy": need()}, replace(RANK, training_nbytes=110 * GIB))


def test_activations_that_may_not_fit_are_one_warning() -> None:
    memory = planned(2, 2, {"policy": need()}, replace(RANK, activations_nbytes=70 * GIB))

    (warning,) = memory.warnings
    assert "training may need 111.0 GiB" in warning
    assert "activations, at most, 70.0" in warning
    assert "train.max_tokens_per_micro_batch" in warning


def test_the_table_has_what_is_expected_and_seen() -> None:
    engines = {"policy": need()}
    memory = planned(2, 2, engines, replace(RANK, activations_nbytes=0))

    table = placed(2, 2, engines).table(
        memory.columns({"train": {(0, 0): 42 * GIB, (0, 1): 43 * GIB}})
    )

    assert table == [
        "GPUs  ranks  engines   start  sync  generation  train",
        "0     0      policy-0  76.0   40.0  96.0        41.0 (42.0)",
        "1     1      policy-1  76.0   40.0  96.0        41.0 (43.0)",
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, 2000, 20000]),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_what_is_planned_fits(
    num_gpus: int, has_judge: bool, kv_num_tokens: int | None, rank_gib: int, weights_gib: int
) -> None:
    rank = replace(
        RANK, sync_nbytes=rank_gib * GIB, generation_nbytes=rank_gib * GIB, activations_nbytes=0
    )
    engines = {"policy": need(weights_nbytes=weights_gib * GIB, kv_num_tokens=kv_num_tokens)}
    if has_judge:
        engines["judge"] = need("colocated", weights_nbytes=weights_gib * GIB)
    try:
        memory = planned(num_gpus, num_gpus, engines, rank)
    except ConfigError:
        return
    assert all(n <= GPU for by_gpu in memory.expected_nbytes.values() for n in by_gpu.values())
    assert set(memory.kv_num_tokens) == set(engines)
    if kv_num_tokens is None:  # and what is free is used
        fullest = max(memory.expected_nbytes[p][0, 0] for p in ("start", "generation"))
        assert fullest > USABLE - MIB or memory.kv_num_tokens["policy"] == 1024
