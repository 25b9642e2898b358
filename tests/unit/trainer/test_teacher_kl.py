"""On-policy distillation: what the logprobs of a teacher add to the gradient. V: vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_models import listed

from umbra.trainer.algorithms.base import LossOutput
from umbra.trainer.algorithms.losses import clipped_loss
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    PROXIMAL_LOGPROBS,
    ROLLOUT_LOGPROBS,
    TEACHER_LOGPROBS,
)
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.train_model import TokenScores
from umbra.trainer.objective import PolicyObjective

COEF = 0.7


def objective_of(
    logprobs: Tensor,
    teacher: Tensor,
    weights: Tensor,
    advantages: Tensor,
    sampled: Tensor | None = None,
) -> LossOutput:
    """On the first update; on-policy, unless other logprobs are `sampled`."""
    unused: Any = None
    old = logprobs.detach()
    micro_batch = MicroBatch(
        inputs=unused,
        targets=unused,
        columns={
            ADVANTAGES: advantages,
            PROXIMAL_LOGPROBS: old,
            ROLLOUT_LOGPROBS: old if sampled is None else sampled,
            TEACHER_LOGPROBS: teacher,
        },
        weights=weights,
        sample_lens=torch.tensor([len(logprobs)]),
        places=np.zeros(0, np.int64),
    )
    train = TrainSection(steps=1, teacher_kl_coef=COEF)
    return PolicyObjective(train, clipped_loss)(TokenScores(logprobs, None), micro_batch)


def test_each_token_s_advantage_loses_its_log_ratio_to_the_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(4, 11, generator=generator, dtype=torch.float64)
    logprobs, teacher, weights = -3 * drawn[0], -3 * drawn[1], drawn[2]
    advantages = drawn[3] - 0.5
    logprobs.requires_grad_()

    output = objective_of(logprobs, teacher, weights, advantages)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)

    log_ratios = [a - b for a, b in zip(listed(logprobs), listed(teacher), strict=True)]
    expected = [
        -weight * (advantage - COEF * log_ratio)
        for weight, advantage, log_ratio in zip(
            listed(weights), listed(advantages), log_ratios, strict=True
        )
    ]
    assert listed(gradient) == pytest.approx(expected, rel=1e-12)
    assert listed(output.metrics["teacher_kl"].values) == pytest.approx(log_ratios)


def test_a_sample_with_the_engines_logprobs_for_the_teacher_s_learns_nothing_from_it() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    sampled = logprobs.detach() + 0.1  # by weights of another version

    output = objective_of(logprobs, sampled, torch.ones(3), torch.zeros(3), sampled)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)

    assert listed(gradient) == listed(output.metrics["teacher_kl"].values) == [0.0, 0.0, 0.0]


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """Of one position, over all tokens that the policy may sample there."""
    generator = torch.Generator().manual_seed(1)
    logits, others = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    teacher = torch.log_softmax(others, -1)
    logits.requires_grad_()
    policy = torch.log_softmax(logits, -1)

    probabilities, nothing = policy.detach().exp(), torch.zeros(9, dtype=torch.float64)
    loss = objective_of(policy, teacher, probabilities, nothing).loss
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)

    divergence = (policy.exp() * (policy - teacher)).sum()
    (expected,) = torch.autograd.grad(COEF * divergence, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
