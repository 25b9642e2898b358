"""Training on several ranks is training on one: real processes, gloo, FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import start_fork
from rank_programs import GROUP_SIZE, GROUPS, MAX_NEW_TOKENS, Arrays, normalized, run_all
from training_models import make_model

from umbra.runtime.testing.distributed_world import DistributedWorld

pytestmark = [pytest.mark.process, pytest.mark.slow]

# By variant: parameters and the metrics of each step.
Outcomes = dict[str, tuple[Arrays, list[dict[str, float]]]]

_WITH_KL: dict[str, Any] = {"kl_coef": 0.1, "updates_per_batch": 2}
_DECOUPLED: dict[str, Any] = {"loss": "decoupled", "updates_per_batch": 2}
_GSPO: dict[str, Any] = {"loss": "gspo", "loss_aggregation": "sequence", "updates_per_batch": 2}
_REGULARIZED: dict[str, Any] = {"kl_coef": 0.1, "reference_every": 2, "entropy_coef": 0.3}
_GAE: dict[str, Any] = {
    "advantage": "gae",
    "advantage_norm": "batch",
    "kl_coef": 0.1,
    "kl_in_reward": True,
    "updates_per_batch": 2,
}
_WARM: dict[str, Any] = {"warms_up": True}
_OWN_LOSS: dict[str, Any] = {"loss": "rank_programs:own_loss"}
_OUTER: dict[str, Any] = {
    "kind": "llama",
    "lora_rank": 3,
    "lora_targets": ["embed_tokens", "lm_head", "up_proj"],
}
_EXPERTS: dict[str, Any] = {"kind": "qwen3-moe", "lora_rank": 8, "lora_targets": ["experts"]}
# Changes to the settings, and options of the run. All start from the same model and see the same
# global batches.
ON_ONE_RANK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token": ({}, {}),
    "sequence": ({"loss_aggregation": "sequence"}, {}),
    "constant": ({"loss_aggregation": "constant"}, {}),
    "kl": (_WITH_KL, {}),
    "decoupled": (_DECOUPLED, {}),
    "gspo": (_GSPO, {}),
    "regularized": (_REGULARIZED, {}),
    "own loss": (_OWN_LOSS, {}),
    "lora": (_WITH_KL, {"lora_rank": 3}),
    "outer": (_WITH_KL, _OUTER),
    "experts": (_WITH_KL, _EXPERTS),
    "gae": (_GAE, {}),
    "gae, lora": (_GAE, {"lora_rank": 3}),
    "gae, warmed up": (_GAE, _WARM),
}
ON_TWO_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token": ({}, {}),
    "layer": ({}, {"wrap": "layer"}),
    "layer, accumulated": ({}, {"wrap": "layer", "micro_batches": 2}),
    "replicated": ({}, {"num_replicas": 2}),
    "replicated, layer": ({}, {"num_replicas": 2, "wrap": "layer", "micro_batches": 2}),
    "replicated, accumulated": ({}, {"num_replicas": 2, "micro_batches": 4}),
    "chunked": ({}, {"chunked": True}),
    "chunked, layer": ({}, {"chunked": True, "wrap": "layer", "micro_batches": 2}),
    "offloaded": ({"kl_coef": 0.1}, {"offload": "all"}),
    "offloaded, layer": ({"kl_coef": 0.1}, {"offload": "all", "wrap": "layer"}),
    "optimizer offloaded": ({"kl_coef": 0.1}, {"offload": "optimizer"}),
    "never offloaded": ({"kl_coef": 0.1}, {}),
    "muon": ({"optimizer": "muon", "ema": 0.9}, {}),
    "muon, offloaded": ({"optimizer": "muon", "ema": 0.9}, {"offload": "all"}),
    "8 bits": ({"optimizer": "adamw_8bit"}, {}),
    "8 bits, offloaded": ({"optimizer": "adamw_8bit"}, {"offload": "all"}),
    "never offloaded, layer": ({"kl_coef": 0.1}, {"wrap": "layer"}),
    "recomputed": ({}, {"recomputes": True}),
    "recomputed, layer": ({}, {"recomputes": True, "wrap": "layer", "micro_batches": 2}),
    "accumulated": ({}, {"micro_batches": 4}),
    "mostly empty micro-batches": ({}, {"micro_batches": 20}),
    "sequence": ({"loss_aggregation": "sequence"}, {"micro_batches": 3}),
    "constant": ({"loss_aggregation": "constant"}, {"micro_batches": 3}),
    "kl, padded": (_WITH_KL, {"packed": False, "micro_batches": 2}),
    "decoupled, accumulated": (_DECOUPLED, {"micro_batches": 3}),
    "decoupled, layer": (_DECOUPLED, {"wrap": "layer", "micro_batches": 20}),
    "gspo, accumulated": (_GSPO, {"micro_batches": 3}),
    "regularized, chunked": (_REGULARIZED, {"chunked": True, "wrap": "layer", "micro_batches": 2}),
    "own loss, accumulated": (_OWN_LOSS, {"micro_batches": 20}),
    "lora": (_WITH_KL, {"lora_rank": 3, "offload": "all"}),
    "lora, layer": (_WITH_KL, {"lora_rank": 3, "wrap": "layer", "micro_batches": 2}),
    "lora, replicated": (_WITH_KL, {"lora_rank": 3, "num_replicas": 2}),
    "lora, recomputed": (_WITH_KL, {"lora_rank": 3, "recomputes": True, "wrap": "layer"}),
    "lora, padded": (_WITH_KL, {"lora_rank": 3, "packed": False, "micro_batches": 3}),
    "lora, chunked": (_WITH_KL, {"lora_rank": 3, "chunked": True}),
    "outer, chunked": (_WITH_KL, {**_OUTER, "chunked": True, "micro_batches": 2}),
    "outer, layer": (_WITH_KL, {**_OUTER, "wrap": "layer", "offload": "all"}),
    "experts, layer": (_WITH_KL, {**_EXPERTS, "wrap": "layer", "micro_batches": 2}),
    "experts, recomputed": (_WITH_KL, {**_EXPERTS, "recomputes": True}),
    "gae, layer": (_GAE, {"wrap": "layer", "micro_batches": 20, "offload": "all"}),
    "gae, padded": (_GAE, {"packed": False, "micro_batches": 3, "recomputes": True}),
    "gae, lora, layer": (_GAE, {"lora_rank": 3, "wrap": "layer", "micro_batches": 2}),
    "token, warmed up": ({}, _WARM),
    "layer, accumulated, warmed up": ({}, _WARM | {"wrap": "layer", "micro_batches": 2}),
    "lora, chunked, warmed up": (_WITH_KL, _WARM | {"lora_rank": 3, "chunked": True}),
    "replicated, accumulated, warmed up": ({}, _WARM | {"num_replicas": 2, "micro_batches": 4}),
    "gae, padded, warmed up": (
        _GAE,
        _WARM | {"packed": False, "micro_batches": 3, "recomputes": True},
    ),
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Outcomes:
    return train_all(tmp_path_factory, ON_ONE_RANK, 1)[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> list[Outcomes]:
    return train_all(tmp_path_factory, ON_TWO_RANKS, 2)


def train_all(
    folders: pytest.TempPathFactory,
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    num_ranks: int,
) -> list[Outcomes]:
    run = DistributedWorld(folders.mktemp("world"), start_fork)
    calls = {name: ["train_variant", *arguments] for name, arguments in variants.items()}
    return run(run_all, calls, num_ranks=num_ranks, timeout_s=120.0)


def assert_same(one: Arrays, other: Arrays, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("single", "double"),
    [
        ("token", "token"),
        ("token", "layer"),
        ("token", "layer, accumulated"),
        ("token", "replicated"),
        ("token", "replicated, layer"),
        ("token", "replicated, accumulated"),
        ("token", "chunked"),
        ("token", "chunked, layer"),
        ("token", "recomputed"),
        ("token", "recomputed, layer"),
        ("token", "accumulated"),
        ("token", "mostly empty micro-batches"),
        ("sequence", "sequence"),
        ("constant", "constant"),
        ("kl", "kl, padded"),
        ("decoupled", "decoupled, accumulated"),
        ("decoupled", "decoupled, layer"),
        ("gspo", "gspo, accumulated"),
        ("regularized", "regularized, chunked"),
        ("own loss", "own loss, accumulated"),
        ("lora", "lora"),
        ("lora", "lora, layer"),
        ("lora", "lora, replicated"),
        ("lora", "lora, recomputed"),
        ("lora", "lora, padded"),
        ("lora", "lora, chunked"),
        ("outer", "outer, chunked"),
        ("outer", "outer, layer"),
        ("experts", "experts, layer"),
        ("experts", "experts, recomputed"),
        ("gae", "gae, layer"),
        ("gae", "gae, padded"),
        ("gae, lora", "gae, lora, layer"),
    ],
)
def test_two_ranks_train_like_one(
    one_rank: Outcomes, two_ranks: list[Outcomes], single: str, double: str
) -> None:
    alone, metrics_alone = one_rank[single]
    together, metrics = two_ranks[0][double]

    assert_same(alone, together, tolerance=1e-5)
    for one, two in zip(metrics_alone, metrics, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            if name.startswith(("train/", "critic/")):
                assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), name


def test_only_adapters_are_trained_and_the_model_without_them_is_the_reference(
    one_rank: Outcomes,
) -> None:
    (parameters, metrics), start = one_rank["lora"], dict(make_model().named_parameters())

    for name, value in parameters.items():
        if name in start:
            np.testing.assert_array_equal(value, start[name].detach().numpy(), err_msg=name)
    seconds = [value for name, value in parameters.items() if ".lora_B." in name]
    assert len(seconds) == 14
    assert all(np.abs(second).max() > 0 for second in seconds)
    first, *later = (row["train/reference_kl"] for row in metrics)
    assert first == 0.0
    assert all(kl > 1e-5 for kl in later)


def test_the_reference_becomes_the_policy_after_so_many_steps(one_rank: Outcomes) -> None:
    _, metrics = one_rank["regularized"]

    first, second, third = (row["train/reference_kl"] for row in metrics)
    assert second > 1e-5 > first == third == 0.0


def test_an_entropy_bonus_raises_the_entropy(one_rank: Outcomes) -> None:
    (_, without), (_, with_bonus) = one_rank["token"], one_rank["regularized"]

    assert with_bonus[0]["train/entropy"] == without[0]["train/entropy"]
    assert with_bonus[2]["train/entropy"] > without[2]["train/entropy"]


def test_advantages_are_normalized_over_the_samples_of_all_ranks(
    tmp_path: Path, fork_server: None
) -> None:
    advantages = [0.5, -1.0, 2.0, 0.25, 4.0]
    run = DistributedWorld(tmp_path, start_fork)

    first, second = run(normalized, [advantages[:2], advantages[2:]], num_ranks=2, timeout_s=60.0)

    values = np.asarray(advantages)
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    np.testing.assert_allclose([*first, *second], expected, rtol=1e-6)


def test_metrics_of_a_users_loss_are_logged_as_it_asks(two_ranks: list[Outcomes]) -> None:
    _, metrics = two_ranks[0]["own loss, accumulated"]

    assert metrics[0]["train/own_samples"] == pytest.approx(GROUPS * GROUP_SIZE)
    assert metrics[0]["train/own_longest"] <= MAX_NEW_TOKENS
    assert metrics[0]["train/own_longest"] > metrics[0]["train/own_len_mean"] > 1


@pytest.mark.slow
def test_ranks_hold_the_same_parameters_and_report_the_same(
    two_ranks: list[Outcomes],
) -> None:
    for name in ON_TWO_RANKS:
        assert_same(two_ranks[0][name][0], two_ranks[1][name][0], tolerance=0.0)
        for one, two in zip(two_ranks[0][name][1], two_ranks[1][name][1], strict=True):
            assert {k: v for k, v in one.items() if k != "time/train_s"} == {
                k: v for k, v in two.items() if k != "time/train_s"
            }


@pytest.mark.parametrize(
    ("plain", "offloaded"),
    [
        ("never offloaded", "offloaded"),
        ("never offloaded", "optimizer offloaded"),
        ("never offloaded, layer", "offloaded, layer"),
        ("muon", "muon, offloaded"),
        ("8 bits", "8 bits, offloaded"),
    ],
)
def test_offloading_changes_no_bit(two_ranks: list[Outcomes], plain: str, offloaded: str) -> None:
    for outcomes in two_ranks:
        assert_same(outcomes[plain][0], outcomes[offloaded][0], tolerance=0.0)
        for one, two in zip(outcomes[plain][1], outcomes[offloaded][1], strict=True):
            assert one | {"time/train_s": 0.0} == two | {"time/train_s": 0.0}


def test_a_warm_up_changes_no_bit(one_rank: Outcomes, two_ranks: list[Outcomes]) -> None:
    for outcomes in (one_rank, *two_ranks):
        warmed = [name for name in outcomes if name.endswith(", warmed up")]
        assert warmed
        for name in warmed:
            cold = outcomes[name.removesuffix(", warmed up")]
            assert_same(cold[0], outcomes[name][0], tolerance=0.0)
            for one, two in zip(cold[1], outcomes[name][1], strict=True):
                assert one | {"time/train_s": 0.0} == two | {"time/train_s": 0.0}


@pytest.mark.slow
def test_training_moves_parameters_and_kl_is_measured(one_rank: Outcomes) -> None:
    (plain, _), (with_kl, metrics) = one_rank["token"], one_rank["kl"]

    assert max(float(np.abs(plain[name] - with_kl[name]).max()) for name in plain) > 1e-3
    assert metrics[0]["train/reference_kl"] == 0.0
    assert metrics[2]["train/reference_kl"] > 0.0


def test_an_error_of_one_rank_is_every_ranks_error(
    umbra_distributed_world: DistributedWorld,
) -> None:
    calls: dict[str, list[str]] = {"error": ["raise_on_lead"], "metrics": ["metrics_that_differ"]}

    said = umbra_distributed_world(run_all, calls, num_ranks=2)

    assert [of_rank["error"] for of_rank in said] == ["UmbraError: only rank 0 knows"] * 2
    for rank, of_rank in enumerate(said):
        assert f"returned the metrics ['of_rank_{rank}'] on this rank" in of_rank["metrics"]


def test_a_signal_to_one_rank_is_every_ranks_signal(
    umbra_distributed_world: DistributedWorld,
) -> None:
    agreed = umbra_distributed_world(run_all, {"signals": ["signals_agreed_on"]}, num_ranks=2)

    assert agreed == [{"signals": ["SIGINT", ""]}] * 2
