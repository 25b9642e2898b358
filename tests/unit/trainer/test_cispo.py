"""CISPO against plain loops in float64 that follow the paper's equations 4 and 5."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from training_models import listed

from umbra.trainer.algorithms.base import LossInputs
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection

NUM_TOKENS = 40


def random_tokens() -> tuple[Tensor, LossInputs]:
    """Logprobs of the policy, and what belongs to them; weights as "token" has them."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    old = normal() - 2
    logprobs = old + 0.7 * normal()
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=logprobs,
        advantages=normal(),
        weights=torch.full((NUM_TOKENS,), 1 / NUM_TOKENS, dtype=torch.float64),
        sample_lens=torch.tensor([NUM_TOKENS]),
    )
    return logprobs, inputs


def settings(low: float, high: float) -> TrainSection:
    return TrainSection(steps=1, clip_eps_low=low, clip_eps_high=high)


def naive_weights(logprobs: Tensor, inputs: LossInputs, low: float, high: float) -> list[float]:
    """The clipped importance weights, which have no gradient."""
    pairs = zip(listed(logprobs), listed(inputs.rollout_logprobs), strict=True)
    return [min(max(math.exp(new) / math.exp(old), 1 - low), 1 + high) for new, old in pairs]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.3, 1.0), (1.0, 0.5)])
def test_loss_and_gradient_are_the_papers_formula(low: float, high: float) -> None:
    logprobs, inputs = random_tokens()
    weights = naive_weights(logprobs, inputs, low, high)
    terms = list(zip(weights, listed(inputs.advantages), listed(logprobs), strict=True))
    policy = logprobs.clone().requires_grad_()

    loss = cispo_loss(policy, inputs, settings(low, high)).loss
    (gradient,) = torch.autograd.grad(loss, policy)

    assert float(loss.detach()) == pytest.approx(
        -sum(w * a * new for w, a, new in terms) / NUM_TOKENS
    )
    assert listed(gradient) == pytest.approx([-w * a / NUM_TOKENS for w, a, _ in terms])


def test_clipped_tokens_are_counted_and_keep_their_gradient() -> None:
    logprobs, inputs = random_tokens()
    policy = logprobs.clone().requires_grad_()

    result = cispo_loss(policy, inputs, settings(0.2, 0.2))
    (gradient,) = torch.autograd.grad(result.loss, policy)

    ratios = (logprobs - inputs.rollout_logprobs).exp()
    clipped: list[Any] = listed((ratios < 0.8) | (ratios > 1.2))
    assert 0 < sum(clipped) < NUM_TOKENS
    assert listed(result.metrics["clipped_share"].values) == clipped
    torch.testing.assert_close(result.metrics["ratio_mean"].values, ratios)
    assert (gradient != 0).all()


def test_a_low_of_one_is_no_lower_bound() -> None:
    logprobs, inputs = random_tokens()
    ratios = (logprobs - inputs.rollout_logprobs).exp()

    clipped = cispo_loss(logprobs, inputs, settings(1.0, 0.2)).metrics["clipped_share"].values

    assert listed(clipped) == listed(ratios > 1.2)
