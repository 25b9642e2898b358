"""Training on tokens of older policies, and whether engine and trainer agree on logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forked_ranks import start_fork
from off_policy_programs import run_all
from rank_programs import Arrays
from training_models import save_model

from umbra.runtime.testing.distributed_world import DistributedWorld

pytestmark = [pytest.mark.process]

_DECOUPLED: dict[str, Any] = {"loss": "decoupled", "importance_cap": 1.5}
_TWICE: dict[str, Any] = {"updates_per_batch": 2}
_KL_IN_REWARD: dict[str, Any] = {"kl_coef": 0.5, "kl_in_reward": True}
_WITH_REFERENCE: dict[str, Any] = {"kl_coef": 0.5}
NUM_MICRO_BATCHES = 3


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> dict[str, Any]:
    """Results of one rank's programs."""
    folder = tmp_path_factory.mktemp("off_policy")
    calls: dict[str, list[Any]] = {
        "once": ["train_steps", _DECOUPLED, NUM_MICRO_BATCHES],
        "twice": ["train_steps", _DECOUPLED | _TWICE, NUM_MICRO_BATCHES],
        "by hand": ["train_by_hand", _DECOUPLED | _TWICE, NUM_MICRO_BATCHES],
        "mini-batches": ["train_steps", _DECOUPLED | _TWICE, 2 * NUM_MICRO_BATCHES, 2],
        "mini-batches by hand": ["train_by_hand", _DECOUPLED | _TWICE, 2 * NUM_MICRO_BATCHES, 2],
        "kl in the reward": ["train_steps", _DECOUPLED | _TWICE | _KL_IN_REWARD, 6, 2],
        "kl in the reward by hand": ["train_by_hand", _DECOUPLED | _TWICE | _KL_IN_REWARD, 6, 2],
        "clipped twice": ["train_steps", _TWICE, NUM_MICRO_BATCHES],
        "masked": ["train_steps", _DECOUPLED | {"importance_above_cap": "mask"}, 1],
        "floor": ["train_steps", _DECOUPLED | {"importance_floor": 0.9}, 1],
        "resumed": ["resume", _DECOUPLED | _TWICE, str(folder / "once"), 2],
        "start as reference": ["resume", _WITH_REFERENCE, str(folder / "start"), 2, 5],
        # The reference is the policy after two of three steps.
        "reference resumed": [
            "resume",
            _WITH_REFERENCE | {"reference_every": 2},
            str(folder / "reference"),
            3,
        ],
        "critic resumed": [
            "resume",
            _DECOUPLED | _TWICE | {"advantage": "gae"},
            str(folder / "critic"),
            2,
        ],
    }
    for changes, name in ((_DECOUPLED, "decoupled"), ({}, "clipped")):
        for updates in (1, 2):
            settings = changes | {"updates_per_batch": updates}
            calls[f"on-policy {name} {updates}"] = ["train_on_policy", settings, 2]
    world = DistributedWorld(tmp_path_factory.mktemp("world"), start_fork)
    return world(run_all, calls, num_ranks=1, timeout_s=120.0)[0]


def largest_difference(one: Arrays, other: Arrays) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("updates", [1, 2])
def test_on_tokens_of_the_policy_both_losses_make_the_same_steps(
    ran: dict[str, Any], updates: int
) -> None:
    decoupled, metrics = ran[f"on-policy decoupled {updates}"]
    clipped, metrics_clipped = ran[f"on-policy clipped {updates}"]

    assert largest_difference(decoupled, clipped) < 1e-6
    for one, two in zip(metrics, metrics_clipped, strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-6)
        assert one["train/importance_mean"] == pytest.approx(1.0)
        assert one["train/importance_max"] == pytest.approx(1.0)
        assert one["train/importance_limited_share"] == 0.0
        assert not any("importance" in name for name in two)


def test_the_first_updates_logprobs_are_the_proximal_ones(ran: dict[str, Any]) -> None:
    parameters, _, _ = ran["twice"]

    assert largest_difference(parameters, ran["by hand"]) < 1e-6


def test_every_mini_batch_is_a_step_with_the_logprobs_before_the_first(ran: dict[str, Any]) -> None:
    parameters, _, _ = ran["mini-batches"]

    assert largest_difference(parameters, ran["mini-batches by hand"]) < 1e-6
    assert largest_difference(parameters, ran["twice"][0]) > 1e-4


def test_with_the_kl_in_the_reward_it_is_in_the_advantages_and_not_in_the_loss(
    ran: dict[str, Any],
) -> None:
    parameters, metrics, _ = ran["kl in the reward"]

    assert largest_difference(parameters, ran["kl in the reward by hand"]) < 1e-6
    assert largest_difference(parameters, ran["mini-batches"][0]) > 1e-4
    assert all(row["train/reference_kl"] > 0 for row in metrics)


def test_the_proximal_policy_costs_no_pass(ran: dict[str, Any]) -> None:
    assert ran["once"][2] == 3 * NUM_MICRO_BATCHES
    assert ran["twice"][2] == ran["clipped twice"][2] == 2 * 3 * NUM_MICRO_BATCHES


def test_on_old_tokens_the_losses_and_limits_differ(ran: dict[str, Any]) -> None:
    parameters = {name: ran[name][0] for name in ("once", "masked", "floor", "clipped twice")}
    once, masked, floor = (ran[name][1][0] for name in ("once", "masked", "floor"))

    for name in ("masked", "floor", "clipped twice"):
        assert largest_difference(parameters["once"], parameters[name]) > 1e-4, name
    assert 0 < once["train/importance_limited_share"] < floor["train/importance_limited_share"]
    assert masked["train/importance_mean"] < once["train/importance_mean"] <= 1.5
    assert once["train/importance_max"] > 1.5
    assert once["train/behaviour_kl"] > 0.1
    assert (once["train/ratio_mean"], once["train/clipped_share"]) == (pytest.approx(1.0), 0.0)


@pytest.mark.parametrize(
    "name", ["resumed", "start as reference", "reference resumed", "critic resumed"]
)
def test_training_resumes_from_a_checkpoint_as_without_one(ran: dict[str, Any], name: str) -> None:
    straight, resumed = ran[name]

    assert largest_difference(straight, resumed) == 0.0


TEMPERATURES = (1.0, 0.6, 1.7)
ATTENTIONS = ("packed", "padded")


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def generated(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: None,
) -> dict[str, Arrays]:
    """By temperature and attention: logprobs of an engine and of the trainer."""
    folders = [
        str(save_model(tmp_path_factory.mktemp("model"), request.param, seed)) for seed in (0, 1)
    ]
    calls: dict[str, list[Any]] = {
        f"{temperature} {attention}": ["generate_and_recompute", folders, temperature, attention]
        for temperature in TEMPERATURES
        for attention in ATTENTIONS
    }
    world = DistributedWorld(tmp_path_factory.mktemp("world"), start_fork)
    return world(run_all, calls, num_ranks=1, timeout_s=120.0)[0]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_an_engines_logprobs_are_the_trainers_under_the_version_that_made_the_token(
    generated: dict[str, Arrays], temperature: float, attention: str
) -> None:
    arrays = generated[f"{temperature} {attention}"]
    engine, versions = arrays["engine"], arrays["versions"]

    for version in (0, 1):
        is_of_version = versions == version
        assert is_of_version.sum() > 50
        same = np.abs(engine - arrays[str(version)])[is_of_version]
        other = np.abs(engine - arrays[str(1 - version)])[is_of_version]
        assert same.max() < 1e-4
        assert other.mean() > 0.1
