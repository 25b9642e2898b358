"""Losses against plain loops that follow the papers' formulas. T: tokens of a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from training_models import listed

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import (
    Aggregation,
    KlEstimator,
    cispo_loss,
    clipped_loss,
    dppo_loss,
    gspo_loss,
    kl_terms,
    kl_to_go,
    sapo_loss,
    token_weights,
)
from umbra.trainer.config.trainer_config import TrainSection

LENS = [3, 1, 5, 0, 2]
MAX_NEW_TOKENS = 8


def random_tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs under the policy and under the behaviour policy, and advantages; [M] each."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENS)
    logprobs = -torch.rand(num_tokens, generator=generator) * 3
    old = logprobs + 0.4 * torch.randn(num_tokens, generator=generator)
    per_sample = torch.randn(len(LENS), generator=generator)
    return logprobs, old, torch.repeat_interleave(per_sample, torch.tensor(LENS))


def loss_of(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    low: float = 0.2,
    high: float = 0.2,
) -> LossOutput:
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=old,
        advantages=advantages,
        weights=weights,
        sample_lens=torch.tensor([len(old)]),
    )
    return clipped_loss(logprobs, inputs, bounds(low, high))


def naive_objective(logp: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return min(ratio * advantage, clipped * advantage)


def naive_weight(aggregation: Aggregation, length: int) -> float:
    return {
        "token": 1 / sum(LENS),
        "sequence": 1 / (len(LENS) * max(length, 1)),
        "constant": 1 / (len(LENS) * MAX_NEW_TOKENS),
    }[aggregation]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 5.0)])
def test_the_clipped_loss_is_the_papers_formula(
    aggregation: Aggregation, low: float, high: float
) -> None:
    logprobs, old, advantages = random_tokens()
    expected, place = 0.0, 0
    for length in LENS:
        for _ in range(length):
            terms = (float(logprobs[place]), float(old[place]), float(advantages[place]))
            expected -= naive_weight(aggregation, length) * naive_objective(*terms, low, high)
            place += 1

    weights = token_weights(
        torch.tensor(LENS),
        aggregation,
        num_tokens_global=sum(LENS),
        num_samples_global=len(LENS),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    result = loss_of(logprobs, old, advantages, weights, low, high)

    assert float(result.loss) == pytest.approx(expected, rel=1e-5)


def test_on_policy_gradient_is_that_of_advantage_times_logprob() -> None:
    logprobs, _, advantages = random_tokens()
    policy = logprobs.clone().requires_grad_()
    weights = torch.full_like(logprobs, 0.1)

    result = loss_of(policy, logprobs, advantages, weights)
    (gradient,) = torch.autograd.grad(result.loss, policy)

    torch.testing.assert_close(gradient, -weights * advantages)
    assert not result.metrics["clipped_share"].values.any()
    assert listed(result.metrics["ratio_mean"].values) == [1.0] * sum(LENS)


def test_the_clip_stops_gradient_only_where_it_would_go_further() -> None:
    old = torch.zeros(4)
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    policy = ratios.log().requires_grad_()

    result = loss_of(policy, old, advantages, torch.ones(4))
    (gradient,) = torch.autograd.grad(result.loss, policy)

    assert listed(gradient == 0) == [True, False, False, True]
    assert listed(result.metrics["clipped_share"].values) == [True, False, False, True]


def test_the_dual_clip_bounds_the_terms_of_negative_advantages() -> None:
    ratios = torch.tensor([5.0, 5.0, 2.5, 0.5], dtype=torch.float64)
    policy = ratios.log().requires_grad_()
    inputs = LossInputs(
        rollout_logprobs=torch.zeros(4),
        proximal_logprobs=torch.zeros(4),
        advantages=torch.tensor([-2.0, 2.0, -2.0, -2.0], dtype=torch.float64),
        weights=torch.ones(4),
        sample_lens=torch.tensor([4]),
    )

    output = clipped_loss(policy, inputs, TrainSection(steps=1, dual_clip=3.0))
    (gradient,) = torch.autograd.grad(output.loss, policy)

    # max(min(ratio A, clip(ratio) A), c A) of a negative A, else without the c
    assert float(output.loss.detach()) == pytest.approx(-(3 * -2 + 1.2 * 2 + 2.5 * -2 + 0.8 * -2))
    assert listed(gradient) == pytest.approx([0.0, 0.0, 2.5 * 2, 0.0])
    assert listed(output.metrics["clipped_share"].values) == [True, True, False, True]


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_kl_estimators_are_zero_for_equal_policies(estimator: KlEstimator) -> None:
    logprobs, _, _ = random_tokens()

    assert kl_terms(logprobs, logprobs, estimator).abs().max() == 0.0


@pytest.mark.parametrize(("estimator", "tolerance"), [("k2", 0.02), ("k3", 0.01)])
def test_kl_estimators_average_to_the_kl(estimator: KlEstimator, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(6, generator=generator).log_softmax(-1)
    reference = (policy + 0.3 * torch.randn(6, generator=generator)).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())

    tokens = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    estimate = kl_terms(policy[tokens], reference[tokens], estimator).mean()

    assert float(estimate) == pytest.approx(exact, abs=tolerance)


def test_k3_is_never_negative() -> None:
    logprobs, reference, _ = random_tokens()

    assert (kl_terms(logprobs, reference, "k3") >= 0).all()


def test_a_token_pays_for_the_kl_of_its_sample_from_it_on() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = -3 * torch.rand(2, sum(LENS), generator=generator, dtype=torch.float64)

    expected: list[float] = []
    start = 0
    for length in LENS:
        for first in range(start, start + length):
            later = range(first, start + length)
            expected.append(sum(float(logprobs[t]) - float(reference[t]) for t in later))
        start += length
    assert listed(kl_to_go(logprobs, reference, torch.tensor(LENS))) == pytest.approx(expected)


def test_sums_of_the_kl_are_exact_in_the_last_of_many_samples() -> None:
    logprobs = torch.full((40_000,), -0.1)
    logprobs[-2:] = -1.0
    lens = torch.tensor([39_998, 2])

    assert listed(kl_to_go(logprobs, torch.zeros(40_000), lens)[-3:]) == [
        pytest.approx(-0.1, abs=1e-8), -2.0, -1.0,
    ]  # fmt: skip


NUM_TOKENS = 40


def float64_tokens(
    spread: float = 0.7, sample_lens: tuple[int, ...] = ()
) -> tuple[Tensor, LossInputs]:
    """Logprobs of the policy, and what belongs to them; weights as "token" has them. `spread`: of
    the logprobs' differences from the engine's and from the proximal ones."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    logprobs = (old + spread * normal()).clamp(max=0.0)
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=(old + spread * normal()).clamp(max=0.0),
        advantages=normal(),
        weights=torch.full((NUM_TOKENS,), 1 / NUM_TOKENS, dtype=torch.float64),
        sample_lens=torch.tensor(sample_lens or [NUM_TOKENS]),
    )
    return logprobs, inputs


def bounds(low: float, high: float) -> TrainSection:
    return TrainSection(steps=1, clip_eps_low=low, clip_eps_high=high)


def naive_weights(logprobs: Tensor, inputs: LossInputs, low: float, high: float) -> list[float]:
    """The clipped importance weights, which have no gradient."""
    pairs = zip(listed(logprobs), listed(inputs.rollout_logprobs), strict=True)
    return [min(max(math.exp(new) / math.exp(old), 1 - low), 1 + high) for new, old in pairs]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.3, 1.0), (1.0, 0.5)])
def test_loss_and_gradient_of_cispo_are_the_papers_formula(low: float, high: float) -> None:
    logprobs, inputs = float64_tokens()
    weights = naive_weights(logprobs, inputs, low, high)
    terms = list(zip(weights, listed(inputs.advantages), listed(logprobs), strict=True))
    policy = logprobs.clone().requires_grad_()

    loss = cispo_loss(policy, inputs, bounds(low, high)).loss
    (gradient,) = torch.autograd.grad(loss, policy)

    assert float(loss.detach()) == pytest.approx(
        -sum(w * a * new for w, a, new in terms) / NUM_TOKENS
    )
    assert listed(gradient) == pytest.approx([-w * a / NUM_TOKENS for w, a, _ in terms])


def test_clipped_tokens_are_counted_and_keep_their_gradient() -> None:
    logprobs, inputs = float64_tokens()
    policy = logprobs.clone().requires_grad_()

    result = cispo_loss(policy, inputs, bounds(0.2, 0.2))
    (gradient,) = torch.autograd.grad(result.loss, policy)

    ratios = (logprobs - inputs.rollout_logprobs).exp()
    clipped: list[Any] = listed((ratios < 0.8) | (ratios > 1.2))
    assert 0 < sum(clipped) < NUM_TOKENS
    assert listed(result.metrics["clipped_share"].values) == clipped
    torch.testing.assert_close(result.metrics["ratio_mean"].values, ratios)
    assert (gradient != 0).all()


def test_a_low_of_one_is_no_lower_bound() -> None:
    logprobs, inputs = float64_tokens()
    ratios = (logprobs - inputs.rollout_logprobs).exp()

    clipped = cispo_loss(logprobs, inputs, bounds(1.0, 0.2)).metrics["clipped_share"].values

    assert listed(clipped) == listed(ratios > 1.2)


@pytest.mark.parametrize(("low", "high"), [(0.05, 0.05), (0.02, 0.1), (1.0, 1.0)])
def test_loss_and_gradient_of_dppo_are_the_papers_formula(low: float, high: float) -> None:
    """Of the binary total variation."""
    logprobs, inputs = float64_tokens()
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

    output = dppo_loss(policy, inputs, bounds(low, high))
    (found,) = torch.autograd.grad(output.loss, policy)

    assert (0 < sum(left_out) < NUM_TOKENS) == (low < 1)
    assert float(output.loss.detach()) == pytest.approx(loss)
    assert listed(found) == pytest.approx(gradient)
    assert listed(output.metrics["clipped_share"].values) == left_out


@pytest.mark.parametrize("args", [{}, {"tau_positive": 3, "tau_negative": 0.5}])
def test_loss_and_gradient_of_sapo_are_the_papers_formula(args: dict[str, Any]) -> None:
    logprobs, inputs = float64_tokens()
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


def test_where_the_ratio_is_one_sapo_has_the_policy_gradient() -> None:
    logprobs, inputs = float64_tokens(0.0)
    policy = logprobs.clone().requires_grad_()

    loss = sapo_loss(policy, inputs, TrainSection(steps=1)).loss
    (gradient,) = torch.autograd.grad(loss, policy)

    torch.testing.assert_close(gradient, -inputs.weights * inputs.advantages)


GSPO_LENS = [3, 1, 5, 0, 2, 4, 7]
LOW, HIGH = 0.1, 0.15
SETTINGS = bounds(LOW, HIGH)


def gspo_tokens() -> tuple[Tensor, LossInputs]:
    """Logprobs of the policy, and what belongs to them; weights as "sequence" has them."""
    generator = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    lens, old = torch.tensor(GSPO_LENS), normal(sum(GSPO_LENS)) - 2
    logprobs = old + 0.4 * normal(sum(GSPO_LENS))
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=logprobs,
        advantages=torch.repeat_interleave(normal(len(GSPO_LENS)), lens),
        weights=torch.repeat_interleave(1 / (len(GSPO_LENS) * lens.double()), lens),
        sample_lens=lens,
    )
    return logprobs, inputs


def samples_of(values: Tensor) -> list[list[float]]:
    return [listed(own) for own in torch.split(values, GSPO_LENS)]


def naive_gspo_loss(logprobs: Tensor, inputs: LossInputs) -> float:
    samples = zip(
        *map(samples_of, (logprobs, inputs.rollout_logprobs, inputs.advantages)), strict=True
    )
    total = 0.0
    for new, old, advantages in samples:
        if new:
            ratio = sequence_ratio(new, old)
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            total += min(ratio * advantages[0], clipped * advantages[0])
    return -total / len(GSPO_LENS)


def sequence_ratio(new: Sequence[float], old: Sequence[float]) -> float:
    probability, old_probability = math.exp(sum(new)), math.exp(sum(old))
    return (probability / old_probability) ** (1 / len(new))


def test_the_gspo_loss_is_the_papers_formula() -> None:
    logprobs, inputs = gspo_tokens()

    assert float(gspo_loss(logprobs, inputs, SETTINGS).loss) == pytest.approx(
        naive_gspo_loss(logprobs, inputs)
    )


def test_the_gradient_is_that_of_finite_differences() -> None:
    logprobs, inputs = gspo_tokens()
    policy = logprobs.clone().requires_grad_()

    (gradient,) = torch.autograd.grad(gspo_loss(policy, inputs, SETTINGS).loss, policy)

    step = 1e-6
    for idx in range(len(logprobs)):
        shift = torch.zeros_like(logprobs)
        shift[idx] = step
        above, below = (
            naive_gspo_loss(logprobs + shift, inputs),
            naive_gspo_loss(logprobs - shift, inputs),
        )
        assert float(gradient[idx]) == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_the_clip_takes_whole_samples() -> None:
    logprobs, inputs = gspo_tokens()
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
