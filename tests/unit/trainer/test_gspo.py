"""GSPO against plain loops in float64 that follow the paper's equations 5 and 7."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from training_models import listed

from umbra.trainer.algorithms.base import LossInputs
from umbra.trainer.algorithms.losses import gspo_loss
from umbra.trainer.config.trainer_config import TrainSection

LENS = [3, 1, 5, 0, 2, 4, 7]
LOW, HIGH = 0.1, 0.15
SETTINGS = TrainSection(steps=1, clip_eps_low=LOW, clip_eps_high=HIGH)


def random_tokens() -> tuple[Tensor, LossInputs]:
    """Logprobs of the policy, and what belongs to them; weights as "sequence" has them."""
    generator = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    lens, old = torch.tensor(LENS), normal(sum(LENS)) - 2
    logprobs = old + 0.4 * normal(sum(LENS))
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=logprobs,
        advantages=torch.repeat_interleave(normal(len(LENS)), lens),
        weights=torch.repeat_interleave(1 / (len(LENS) * lens.double()), lens),
        sample_lens=lens,
    )
    return logprobs, inputs


def samples_of(values: Tensor) -> list[list[float]]:
    return [listed(own) for own in torch.split(values, LENS)]


def naive_loss(logprobs: Tensor, inputs: LossInputs) -> float:
    samples = zip(
        *map(samples_of, (logprobs, inputs.rollout_logprobs, inputs.advantages)), strict=True
    )
    total = 0.0
    for new, old, advantages in samples:
        if new:
            ratio = sequence_ratio(new, old)
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            total += min(ratio * advantages[0], clipped * advantages[0])
    return -total / len(LENS)


def sequence_ratio(new: Sequence[float], old: Sequence[float]) -> float:
    probability, old_probability = math.exp(sum(new)), math.exp(sum(old))
    return (probability / old_probability) ** (1 / len(new))


def test_the_loss_is_the_papers_formula() -> None:
    logprobs, inputs = random_tokens()

    assert float(gspo_loss(logprobs, inputs, SETTINGS).loss) == pytest.approx(
        naive_loss(logprobs, inputs)
    )


def test_the_gradient_is_that_of_finite_differences() -> None:
    logprobs, inputs = random_tokens()
    policy = logprobs.clone().requires_grad_()

    (gradient,) = torch.autograd.grad(gspo_loss(policy, inputs, SETTINGS).loss, policy)

    step = 1e-6
    for idx in range(len(logprobs)):
        shift = torch.zeros_like(logprobs)
        shift[idx] = step
        above, below = naive_loss(logprobs + shift, inputs), naive_loss(logprobs - shift, inputs)
        assert float(gradient[idx]) == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_the_clip_takes_whole_samples() -> None:
    logprobs, inputs = random_tokens()
    policy = logprobs.clone().requires_grad_()

    result = gspo_loss(policy, inputs, SETTINGS)
    (gradient,) = torch.autograd.grad(result.loss, policy)

    shares = samples_of(result.metrics["clipped_share"].values)
    ratios = samples_of(result.metrics["ratio_mean"].values.detach())
    assert {len(set(own)) for own in (*shares, *ratios)} == {0, 1}
    assert {own[0] for own in shares if own} == {True, False}
    for own, share in zip(samples_of(gradient), shares, strict=True):
        assert [value == 0 for value in own] == share
    expected = map(
        sequence_ratio, samples_of(logprobs)[:3], samples_of(inputs.rollout_logprobs)[:3]
    )
    assert [own[0] for own in ratios[:3]] == pytest.approx(list(expected))
