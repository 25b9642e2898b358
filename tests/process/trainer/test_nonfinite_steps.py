"""Gradients that are not finite: real ranks, gloo, FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
from forked_ranks import start_fork
from nonfinite_programs import SAMPLE, run_all

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
    "loss": ({"plant": "infinite_ratio"}, f"{_OF_SAMPLE} a loss ("),
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


@pytest.fixture(scope="module", params=[1, 2])
def failed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork_server: None
) -> list[dict[str, list[Any]]]:
    """By rank and fault: the error, and whether a parameter changed."""
    world = DistributedWorld(tmp_path_factory.mktemp("world"), start_fork)
    calls = {name: arguments for name, (arguments, _) in FAULTS.items()}
    return world(run_all, calls, num_ranks=request.param, timeout_s=120.0)


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_names_the_origin(failed: list[dict[str, list[Any]]], name: str) -> None:
    (error, has_changed), *others = [of_rank[name] for of_rank in failed]

    assert "step 1: the gradient is not finite (norm " in error
    assert FAULTS[name][1] in error
    assert not has_changed
    assert others == [[error, False]] * (len(failed) - 1)
