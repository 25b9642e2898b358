"""The rules about settings say of every loss and estimator what it does. What a new one lacks
there, or would fail at, fails here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from minimal_config import config_with
from torch import Tensor
from training_models import listed

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import Bounds, annotations_of
from umbra.trainer.algorithms.base import LossInputs, load_advantage_estimator, load_loss
from umbra.trainer.config.algorithm_names import (
    ADVANTAGE_ESTIMATORS,
    LOSSES,
    TOKEN_ADVANTAGES,
)
from umbra.trainer.config.setting_rules import warnings
from umbra.trainer.config.trainer_config import TrainSection

OTHER: Mapping[str, Any] = {
    "clip_eps_low": 0.5,
    "clip_eps_high": 0.5,
    "dual_clip": 3.0,
    "importance_level": "sequence",
    "importance_cap": 1.5,
    "importance_above_cap": "mask",
    "importance_floor": 0.5,
}
"""All settings that losses read, with values that are no defaults."""
LENS = torch.tensor([*[1] * 30, *[3] * 20])
ADVANTAGES_OF_TOKENS = (
    *(f"train.advantage={name}" for name in TOKEN_ADVANTAGES),
    "train.kl_coef=0.1 train.kl_in_reward=true",
    "train.teacher_kl_coef=1 pools.teacher.model_path=models/large",
)


def train_with(**changed: Any) -> TrainSection:
    return TrainSection(steps=1, **changed)


class ReadSettings:
    """Settings that know which of them were read."""

    def __init__(self) -> None:
        self.names = set[str]()

    def __getattr__(self, name: str) -> object:
        self.names.add(name)
        return getattr(train_with(), name)


def gradient(
    name: str, settings: Any, *, moved: float = 4.0, of_last: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The gradient of a loss, and the loss. The logprobs of 90 tokens have moved by up to half of
    `moved`; the last token's advantage is `of_last` times that of its sample."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(3, 90, generator=generator, dtype=torch.float64)
    old, proximal, steps = (
        -moved * drawn[0] - 0.1,
        -moved * drawn[1] - 0.1,
        moved * (drawn[2] - 0.5),
    )
    logprobs = (old + steps).clamp(max=-0.01).requires_grad_()
    advantages = torch.repeat_interleave(torch.randn(50, generator=generator).double(), LENS)
    advantages[-1] *= of_last
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=proximal,
        advantages=advantages,
        weights=torch.full([90], 1 / 90, dtype=torch.float64),
        sample_lens=LENS,
    )
    loss = load_loss(name)(logprobs, inputs, settings).loss
    (found,) = torch.autograd.grad(loss, logprobs)
    return found, loss.detach()


def is_refused(overrides: str) -> bool:
    try:
        config_with(overrides)
    except ConfigError:
        return True
    return False


def test_all_settings_that_losses_read_are_tried_here() -> None:
    read = ReadSettings()

    for name in LOSSES:
        gradient(name, read)

    assert read.names == {*OTHER, "loss_args"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("key", OTHER)
def test_a_setting_of_losses_has_an_effect_or_a_warning(name: str, key: str) -> None:
    before, after = (
        gradient(name, train_with(**changed))[0] for changed in ({}, {key: OTHER[key]})
    )
    found = warnings(config_with(f"train.loss={name} train.{key}={OTHER[key]}"))

    is_warned = any(f"train.{key} has no effect" in text for text in found)
    assert is_warned == torch.equal(before, after)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("moved", [4.0, 0.0])
def test_the_lowest_settings_of_a_loss_give_a_finite_gradient_or_are_refused(
    name: str, moved: float
) -> None:
    bounds = {key: getattr(annotations_of(TrainSection)[key], "__metadata__", ()) for key in OTHER}
    lowest = {
        key: each.ge for key, found in bounds.items() for each in found if isinstance(each, Bounds)
    }
    assert lowest["clip_eps_high"] == 0

    for changed in (lowest, *({key: value} for key, value in lowest.items())):
        overrides = [f"train.{key}={value}" for key, value in changed.items()]
        if not is_refused(" ".join([f"train.loss={name}", *overrides])):
            found = gradient(name, train_with(**changed), moved=moved)
            assert all(torch.isfinite(each).all() for each in found), changed


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_clips_by_rounding_is_warned_about(name: str) -> None:
    clips = {"clip_eps_low": 0.0, "clip_eps_high": 0.0}

    found, _ = gradient(name, train_with(**clips), moved=1e-5)

    overrides = [f"train.{key}={value}" for key, value in clips.items()]
    said = warnings(config_with(" ".join([f"train.loss={name}", *overrides])))
    assert any("clips a token" in text for text in said) == bool((found == 0).any())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("overrides", ADVANTAGES_OF_TOKENS)
def test_a_loss_that_mixes_tokens_refuses_advantages_of_tokens(name: str, overrides: str) -> None:
    found, expected = (
        listed(gradient(name, train_with(), moved=0.01, of_last=factor)[0][:-1])
        for factor in (1, 3)
    )

    assert is_refused(f"train.loss={name} {overrides}") == (found != expected)


WITH_PARTS = "reward.function= reward.functions.a=m:a reward.functions.b=m:b"


@pytest.mark.parametrize("name", [each for each in ADVANTAGE_ESTIMATORS if each != "none"])
def test_rules_know_whether_an_estimator_compares_the_samples_of_a_group(name: str) -> None:
    estimate = load_advantage_estimator(name)
    common = f"{WITH_PARTS} train.advantage={name}"

    found = warnings(config_with(f"{common} rollout.drop_zero_variance_groups=true"))
    of_equal_rewards = estimate(np.ones(4, np.float32))

    is_warned = any("groups of equal rewards teach" in text for text in found)
    assert is_warned == of_equal_rewards.any()
    assert is_refused(f"{common} rollout.group_size=1") == (not of_equal_rewards.any())
