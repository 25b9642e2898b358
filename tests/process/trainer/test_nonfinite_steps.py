"""Gradients that are not finite: real ranks, gloo, FSDP2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forked_ranks import start_fork
from nonfinite_programs import SAMPLE, run_all
from rank_programs import Arrays

from umbra.runtime.testing.distributed_world import DistributedWorld

pytestmark = [pytest.mark.process]

_OF_SAMPLE = f"sample {SAMPLE} (prompt 4) is the first with"
_OF_GRADIENT = "all logprobs and losses are finite, and"
_LAYERED: dict[str, Any] = {"wrap": "layer", "packed": False}
# What is planted, and the sentence about it.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "logprobs": ({"plant": "nan_logprobs"}, f"{_OF_SAMPLE} logprobs that are not finite"),
    "logprobs, layer": (
        {"plant": "nan_logprobs"} | _LAYERED,
        f"{_OF_SAMPLE} logprobs that are not finite",
    ),
    "advantages": (
        {"plant": "infinite_advantage"},
        f"{_OF_SAMPLE} advantages that are not finite",
    ),
    "loss": (
        {"plant": "infinite_ratio"},
        f"{_OF_SAMPLE} gradients of the loss that are not finite",
    ),
    "one parameter": (
        {"plant": "infinite_gradient", "where": "model.layers.0.mlp.up_proj.weight"},
        f"{_OF_GRADIENT} model.layers.0.mlp.up_proj.weight is the first",
    ),
    # Names in the model's list are in another order than the modules' calls.
    "backward": (
        {"plant": "nan_in_backward", "where": "model.layers.1.self_attn.o_proj"},
        f"{_OF_GRADIENT} model.layers.1.self_attn.o_proj.weight is the first",
    ),
    "backward, layer": (
        {"plant": "nan_in_backward", "where": "model.layers.0.mlp.down_proj"} | _LAYERED,
        f"{_OF_GRADIENT} model.layers.0.mlp.down_proj.weight is the first",
    ),
}


# Two batches that are not skipped, with and without a faulty one between them.
SKIPS: dict[str, dict[str, Any]] = {
    "skipped": {"batches": [0, 1, 2, 3], "faulty": [1, 3], "limit": 1},
    "without": {"batches": [0, 2], "faulty": [], "limit": 1},
    "too many": {"batches": [0, 1, 2, 3], "faulty": [1, 2], "limit": 1},
    "before": {"batches": [0], "faulty": [], "limit": 1},
    "updates": {"batches": [0], "faulty": [0], "limit": 2, "updates_per_batch": 2},
}


@pytest.fixture(scope="module", params=[1, 2])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork_server: None
) -> list[dict[str, Any]]:
    """Of each rank: the error of each fault and whether a parameter changed, and what `SKIPS`
    left."""
    world = DistributedWorld(tmp_path_factory.mktemp("world"), start_fork)
    calls: dict[str, list[Any]] = {
        name: ["fail", arguments] for name, (arguments, _) in FAULTS.items()
    }
    calls |= {name: ["skip", arguments] for name, arguments in SKIPS.items()}
    return world(run_all, calls, num_ranks=request.param, timeout_s=120.0)


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_names_the_origin(ran: list[dict[str, Any]], name: str) -> None:
    (error, has_changed), *others = [of_rank[name] for of_rank in ran]

    assert "step 1: the gradient is not finite (norm " in error
    assert FAULTS[name][1] in error
    assert not has_changed
    assert others == [[error, False]] * (len(ran) - 1)


def test_a_skipped_step_leaves_parameters_and_optimizer_as_they_were(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in ran:
        skipped, without = of_rank["skipped"], of_rank["without"]

        assert skipped["error"] == ""
        assert_equal(skipped["state"], without["state"])
        assert set(skipped["updates"]) == set(without["updates"]) == {2}
        assert [row["train/skipped_steps"] for row in skipped["metrics"]] == [0, 1, 0, 1]
        rates = [row["train/learning_rate"] for row in skipped["metrics"]]
        assert [rates[0], rates[2]] == [r["train/learning_rate"] for r in without["metrics"]]
        assert len(skipped["warnings"]) == 2  # the run's display shows those of rank 0
        first, _ = skipped["warnings"]
        assert first.startswith("warning: step 2: the gradient is not finite (norm nan): sample")
        assert f"{_OF_SAMPLE} logprobs that are not finite. It is skipped, as number 1" in first


def test_more_skipped_steps_in_a_row_than_allowed_end_the_run(ran: list[dict[str, Any]]) -> None:
    for of_rank in ran:
        ended = of_rank["too many"]

        assert f"step 3: the gradient is not finite (norm nan): {_OF_SAMPLE}" in ended["error"]
        assert "1 before it were skipped (train.skip_nonfinite)" in ended["error"]
        assert len(ended["warnings"]) == 1
        assert_equal(ended["state"], of_rank["before"]["state"])


def test_each_optimizer_step_of_a_batch_is_skipped_and_counted(ran: list[dict[str, Any]]) -> None:
    for of_rank in ran:
        (row,) = of_rank["updates"]["metrics"]

        assert row["train/skipped_steps"] == len(of_rank["updates"]["warnings"]) == 2
        assert all(map(np.isfinite, row.values()))
        assert "train/grad_norm" not in row


def assert_equal(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
