"""Whether a step notices that engine and trainer compute different models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import start_fork
from logprob_programs import run_all
from training_models import make_model, save_model, save_tokenizer

from umbra.runtime.testing.distributed_world import DistributedWorld

pytestmark = [pytest.mark.process]

FAULTS = (
    "separate head", "head option", "rotary factors", "temperature", "one token", "top-p", "top-k",
)  # fmt: skip
CLEAN = (
    "float32", "bfloat16", "temperature 0.6", "decoupled",
    "top-p at both", "top-k at both", "top-k and top-p at both", "top-p at both, bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> list[dict[str, Any]]:
    """Results of two ranks, by the name of the fault."""
    folder = tmp_path_factory.mktemp("models")
    model = str(save_model(folder / "model"))
    calls: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "temperature 0.6": {"temperature": 0.6},
        "decoupled": {"train": {"loss": "decoupled"}},
        "separate head": {"trainer": _with_head(folder / "head", 0.1)},
        "head option": {"trainer": _with_head(folder / "scaled", 0.0, 0.8)},
        "rotary factors": {"trainer": _with_dynamic_rotary(folder / "rotary")},
        "temperature": {"engine_temperature": 0.8},
        "one token": {"wrong_token": 30},
        "top-p": {"engine_truncation": (0.9, 0)},
        "top-k": {"engine_truncation": (1.0, 20)},
        "top-p at both": {"truncation": (0.9, 0)},
        "top-k at both": {"truncation": (1.0, 20)},
        "top-k and top-p at both": {"truncation": (0.8, 20), "temperature": 0.7},
        "top-p at both, bfloat16": {"truncation": (0.9, 0), "dtype": "bfloat16"},
        "bfloat16, temperature": {"dtype": "bfloat16", "engine_temperature": 0.8},
        "widened": {"engine_temperature": 0.8, "train": {"max_logprob_difference": 0.5}},
        "older first": {"engine_temperature": 0.8, "versions": (1, 0)},
        "resumed": {"engine_temperature": 0.8, "differed_by": 0.005},
        "resumed with a difference": {
            "engine_temperature": 0.8,
            "differed_by": 0.02,
            "versions": (0, 0),
        },
        "later": {"train": {"learning_rate": 1.0}, "versions": (0, 0, 0)},
    }
    calls = {name: {"engine": model} | arguments for name, arguments in calls.items()}
    world = DistributedWorld(tmp_path_factory.mktemp("world"), start_fork)
    return world(run_all, calls, num_ranks=2, timeout_s=120.0)


def _with_head(folder: Path, mixed: float, scale: float = 1.0) -> str:
    """The same model, whose head is a scaled copy of the embeddings, with other rows mixed in."""
    tied, model = make_model(), make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.load_state_dict(tied.state_dict())
        head = tied.lm_head.weight
        model.lm_head.weight.copy_(scale * (head + mixed * head.flip(0)))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def _with_dynamic_rotary(folder: Path) -> str:
    """The same model, whose rotary factors follow the longest sample from 16 tokens on."""
    save_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 16
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_ends_the_run_on_every_rank_before_a_weight_has_changed(
    ran: list[dict[str, Any]], fault: str
) -> None:
    for rank in ran:
        assert rank[fault]["error"] == ran[0][fault]["error"]
        assert rank[fault]["error"].startswith("step 1: engines and trainer do not compute the sam")
        assert not rank[fault]["changed"]


@pytest.mark.parametrize("name", CLEAN)
def test_engine_and_trainer_of_one_model_pass(ran: list[dict[str, Any]], name: str) -> None:
    for rank in ran:
        assert rank[name]["error"] == ""
        assert rank[name]["warnings"] == []
        assert rank[name]["changed"]
        (metrics,) = rank[name]["metrics"]
        highest = 0.05 if "bfloat16" in name else 1e-5
        assert 0 < metrics["train/logprob_difference_mean"] < highest
        assert metrics["train/logprob_difference_mean"] < metrics["train/logprob_difference_max"]


def test_the_error_names_the_token_the_values_the_bounds_and_the_causes(
    ran: list[dict[str, Any]],
) -> None:
    error = ran[0]["one token"]["error"]

    assert re.search(r": token \d+ \('<\d+>'\) at position 30 of sample e0/0/0 has -", error)
    for words in (
        " by the engine and ",
        " by the trainer",
        "on average (allowed: 0.01 in float32)",
        "at most (allowed: 0.3)",
        "tie_word_embeddings",
        "rope_scaling",
        "chat template",
        "pool.engine_args",
        "quantised",
        "train.max_logprob_difference",
    ):
        assert words in error


def test_a_sampling_temperature_of_its_own_shows_in_bfloat16_too(
    ran: list[dict[str, Any]],
) -> None:
    assert "in bfloat16" in ran[1]["bfloat16, temperature"]["error"]


def test_a_wider_bound_lets_a_difference_pass(ran: list[dict[str, Any]]) -> None:
    widened = ran[1]["widened"]

    assert widened["error"] == ""
    assert widened["metrics"][0]["train/logprob_difference_mean"] > 0.01


def test_tokens_of_other_weights_are_not_compared(ran: list[dict[str, Any]]) -> None:
    older_first = ran[1]["older first"]

    (metrics,) = older_first["metrics"]
    assert "train/logprob_difference_mean" not in metrics
    assert older_first["error"].startswith("step 2: ")


def test_a_resumed_run_is_checked_like_a_new_one(ran: list[dict[str, Any]]) -> None:
    for rank in ran:
        assert rank["resumed"]["error"].startswith("step 1: engines and trainer do not")
        assert not rank["resumed"]["changed"]


def test_a_difference_that_was_a_warning_before_a_resume_is_one_after_it(
    ran: list[dict[str, Any]],
) -> None:
    resumed = ran[1]["resumed with a difference"]

    assert (resumed["error"], len(resumed["metrics"])) == ("", 2)
    (warning,) = resumed["warnings"]
    assert warning.startswith("warning: step 1: engines and trainer do not compute the same model")


def test_later_steps_warn_once(ran: list[dict[str, Any]]) -> None:
    later = ran[0]["later"]

    assert len(later["metrics"]) == 3
    (warning,) = later["warnings"]
    assert warning.startswith("warning: step 2: engines and trainer do not compute the same model")
