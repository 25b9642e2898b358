"""Losses and advantage estimators by name, and those of users."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from umbra.runtime.errors import ConfigError, UmbraError
from umbra.trainer.algorithms.base import (
    LossInputs,
    LossOutput,
    load_advantage_estimator,
    load_loss,
)
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.data.train_batch import ADVANTAGES, PROXIMAL_LOGPROBS, ROLLOUT_LOGPROBS
from umbra.trainer.model.micro_batches import MicroBatch, PaddedInputs
from umbra.trainer.model.train_model import TokenScores
from umbra.trainer.objective import PolicyObjective


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading adds to it


@pytest.mark.parametrize("name", LOSSES)
def test_a_registered_loss_has_no_gradient_where_the_advantage_is_0(name: str) -> None:
    """Training leaves such samples out."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.tensor([3, 5, 2])
    old = torch.randn(10, generator=generator) - 2
    logprobs = (old + 0.3 * torch.randn(10, generator=generator)).requires_grad_()
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=old + 0.1,
        advantages=torch.repeat_interleave(torch.tensor([1.0, 0.0, -2.0]), lens),
        weights=torch.full([10], 0.1),
        sample_lens=lens,
    )

    output = load_loss(name)(logprobs, inputs, TrainSection(steps=1))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)

    assert not gradient[3:8].any()
    assert gradient[:3].any()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_registered_estimator_is_there(name: str) -> None:
    assert callable(load_advantage_estimator(name))


def test_users_functions_are_found_in_their_folders(tmp_path: Path) -> None:
    (tmp_path / "found_algorithms.py").write_text(
        "def loss(logprobs, inputs, train): ...\ndef advantages(rewards, scale=2): ...\n"
    )

    loss = load_loss("found_algorithms:loss", [str(tmp_path)])
    estimator = load_advantage_estimator("found_algorithms:advantages", [str(tmp_path)])

    assert loss.__module__ == estimator.__module__ == "found_algorithms"


@pytest.mark.parametrize(
    ("load", "name", "said"),
    [
        (load_loss, "no_such_losses:loss", "train.loss 'no_such_losses:loss': importing"),
        (load_loss, "odd_algorithms:lost", "odd_algorithms.py has no function 'lost'"),
        (
            load_loss,
            "odd_algorithms:loss",
            r"loss\(logprobs\) is called as loss\(logprobs, inputs, settings\): too many",
        ),
        (
            load_advantage_estimator,
            "odd_algorithms:advantages",
            r"train.advantage .*advantages\(\) is called as advantages\(rewards\): too many",
        ),
    ],
)
def test_what_cannot_be_called_is_explained(
    tmp_path: Path, load: Callable[[str, list[str]], object], name: str, said: str
) -> None:
    (tmp_path / "odd_algorithms.py").write_text("def loss(logprobs): ...\ndef advantages(): ...\n")

    with pytest.raises(ConfigError, match=said):
        load(name, [str(tmp_path)])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("logprobs.sum()", r"a tensor of shape \[\] with a gradient"),
        ("(logprobs.sum(), {})", r"tuple \(tensor\("),
        ("None", "NoneType None"),
        ("LossOutput(logprobs, {})", r"LossOutput\(a tensor of shape \[3\] with a gradient, dict"),
        ("LossOutput(logprobs.sum().detach(), {})", r".*tensor of shape \[\] without a gradient"),
        ("LossOutput(logprobs.sum().item(), {})", r"LossOutput\(float -3.0, dict"),
        ("LossOutput(logprobs.sum(), {'p': logprobs})", r".* with a gradient, dict \{'p': tensor"),
        ("LossOutput(logprobs.sum(), None)", ".* with a gradient, NoneType None"),
    ],
)
def test_what_a_users_loss_must_not_return_is_shown(tmp_path: Path, result: str, said: str) -> None:
    with pytest.raises(UmbraError, match=f"train.loss = '.*' returned {said}.*: return LossOut"):
        output_of(tmp_path, result)


def test_a_users_loss_may_have_metrics_or_none(tmp_path: Path) -> None:
    bare = output_of(tmp_path, "LossOutput(logprobs.sum(), {})")
    both = output_of(tmp_path, "LossOutput(logprobs.sum(), {'mine': LossMetric(logprobs)})")

    assert bare.loss.item() == both.loss.item() == -3
    assert both.metrics.keys() - bare.metrics.keys() == {"mine"}


def output_of(folder: Path, result: str) -> LossOutput:
    """What training gets for three tokens from a loss that returns `result`."""
    name = f"loss_{len(list(folder.iterdir()))}_{folder.name}"
    (folder / f"{name}.py").write_text(
        "from umbra.trainer.algorithms.base import LossMetric, LossOutput\n"
        f"def loss(logprobs, inputs, settings): return {result}\n"
    )
    logprobs, unused = torch.full([3], -1.0, requires_grad=True), torch.zeros(3)
    old = logprobs.detach()
    micro_batch = MicroBatch(
        inputs=PaddedInputs(token_ids=unused, predicting=unused),
        targets=unused,
        columns={ADVANTAGES: old, PROXIMAL_LOGPROBS: old, ROLLOUT_LOGPROBS: old},
        weights=torch.ones(3),
        sample_lens=torch.tensor([3]),
        places=np.zeros(0, np.int64),
    )
    train = TrainSection(steps=1, loss=f"{name}:loss")
    objective = PolicyObjective(train, load_loss(train.loss, [str(folder)]))
    return objective(TokenScores(logprobs, None), micro_batch)
