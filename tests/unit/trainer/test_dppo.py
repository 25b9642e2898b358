"""Divergence PPO against a plain loop in float64 like the paper's binary total variation."""

from __future__ import annotations

import math

import pytest
import torch
from random_tokens import NUM_TOKENS, random_tokens
from training_models import listed

from umbra.trainer.algorithms.losses import dppo_loss
from umbra.trainer.config.trainer_config import TrainSection


@pytest.mark.parametrize(("low", "high"), [(0.05, 0.05), (0.02, 0.1), (1.0, 1.0)])
def test_loss_and_gradient_are_the_papers_formula(low: float, high: float) -> None:
    logprobs, inputs = random_tokens()
    loss, gradient, left_out = 0.0, list[float](), list[bool]()
    for new, old, advantage in zip(
        *map(listed, (logprobs, inputs.rollout_logprobs, inputs.advantages)), strict=True
    ):
        moved, ratio = math.exp(new) - math.exp(old), math.exp(new - old)
        left_out.append(moved > high if advantage > 0 else moved < -low)
        weight = 0.0 if left_out[-1] else min(ratio, 20.0)
        loss -= weight * advantage * new / NUM_TOKENS
        gradient.append(-weight * advantage / NUM_TOKENS)
    policy = logprobs.clone().requires_grad_()

    output = dppo_loss(policy, inputs, TrainSection(steps=1, clip_eps_low=low, clip_eps_high=high))
    (found,) = torch.autograd.grad(output.loss, policy)

    assert (0 < sum(left_out) < NUM_TOKENS) == (low < 1)
    assert float(output.loss.detach()) == pytest.approx(loss)
    assert listed(found) == pytest.approx(gradient)
    assert listed(output.metrics["clipped_share"].values) == left_out
