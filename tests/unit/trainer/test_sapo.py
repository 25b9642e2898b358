"""SAPO against a plain loop in float64 that follows the paper's formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from random_tokens import NUM_TOKENS, random_tokens
from training_models import listed

from umbra.trainer.algorithms.losses import sapo_loss
from umbra.trainer.config.trainer_config import TrainSection


@pytest.mark.parametrize("args", [{}, {"tau_positive": 3, "tau_negative": 0.5}])
def test_loss_and_gradient_are_the_papers_formula(args: dict[str, Any]) -> None:
    logprobs, inputs = random_tokens()
    inputs.advantages[1] = 0.0  # its tau is `tau_negative`
    taus = args.get("tau_positive", 1.0), args.get("tau_negative", 1.05)
    loss, gradient, slopes = 0.0, list[float](), list[float]()
    for new, old, advantage in zip(
        *map(listed, (logprobs, inputs.rollout_logprobs, inputs.advantages)), strict=True
    ):
        tau = taus[0] if advantage > 0 else taus[1]
        ratio = math.exp(new - old)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        loss -= 4 / tau * gate * advantage / NUM_TOKENS
        slopes.append(4 * gate * (1 - gate))
        gradient.append(-slopes[-1] * ratio * advantage / NUM_TOKENS)
    policy = logprobs.clone().requires_grad_()

    output = sapo_loss(policy, inputs, TrainSection(steps=1, loss_args=args))
    (found,) = torch.autograd.grad(output.loss, policy)

    assert float(output.loss.detach()) == pytest.approx(loss)
    assert listed(found) == pytest.approx(gradient)
    assert listed(output.metrics["gate_mean"].values) == pytest.approx(slopes)


def test_where_the_ratio_is_one_the_gradient_is_that_of_the_policy_gradient() -> None:
    logprobs, inputs = random_tokens(0.0)
    policy = logprobs.clone().requires_grad_()

    loss = sapo_loss(policy, inputs, TrainSection(steps=1)).loss
    (gradient,) = torch.autograd.grad(loss, policy)

    torch.testing.assert_close(gradient, -inputs.weights * inputs.advantages)
