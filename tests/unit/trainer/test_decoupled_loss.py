"""The decoupled loss against plain loops in float64, and what holds of it at its limits.

M: tokens; V: vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training_models import listed

from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.algorithms.losses import (
    clipped_loss,
    decoupled_loss,
    importance_ratios,
    kl_terms,
    limit_importance,
)
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.step import MetricTotals

LOW, HIGH = 0.2, 0.28


def train_settings(**changes: Any) -> TrainSection:
    return TrainSection(steps=1, clip_eps_low=LOW, clip_eps_high=HIGH, **changes)


NO_LIMITS = train_settings(importance_cap=1e9)


class Tokens(NamedTuple):
    """Logprobs of random tokens, [M] float64 each."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor


def random_tokens(seed: int = 0, num_tokens: int = 60) -> Tokens:
    """Ratios on both sides of all limits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    proximal = -3 * torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    weights = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    return Tokens(proximal + normal(0.3), proximal, proximal + normal(1), normal(1), weights)


def inputs_of(tokens: Tokens) -> LossInputs:
    return LossInputs(
        rollout_logprobs=tokens.behaviour,
        proximal_logprobs=tokens.proximal,
        advantages=tokens.advantages,
        weights=tokens.weights,
        sample_lens=torch.tensor([len(tokens.weights)]),
    )


def loss_of(tokens: Tokens, limits: TrainSection = NO_LIMITS) -> LossOutput:
    return decoupled_loss(tokens.logprobs, inputs_of(tokens), limits)


def logged(result: LossOutput, tokens: Tokens) -> dict[str, float]:
    totals = MetricTotals()
    totals.add(result.metrics, tokens.weights)
    return totals.reduce()


def naive_weight(proximal: float, behaviour: float, limits: TrainSection) -> float:
    weight = math.exp(proximal) / math.exp(behaviour)
    if weight < limits.importance_floor:
        return 0.0
    if weight > limits.importance_cap:
        return limits.importance_cap if limits.importance_above_cap == "truncate" else 0.0
    return weight


def naive_loss(tokens: Tokens, limits: TrainSection) -> float:
    total = 0.0
    for logp, prox, behaviour, advantage, weight in zip(*map(listed, tokens), strict=True):
        ratio = math.exp(logp) / math.exp(prox)
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        objective = min(ratio * advantage, clipped * advantage)
        total -= weight * naive_weight(prox, behaviour, limits) * objective
    return total


LIMITS = {
    "none": NO_LIMITS,
    "default": train_settings(),
    "cap 1": train_settings(importance_cap=1.0),
    "mask": train_settings(importance_cap=1.5, importance_above_cap="mask"),
    "mask, floor": train_settings(
        importance_cap=3.0, importance_above_cap="mask", importance_floor=0.5
    ),
    "truncate, floor": train_settings(importance_cap=3.0, importance_floor=0.5),
}
with_each_limit = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)


@with_each_limit
def test_the_loss_is_the_papers_formula(limits: TrainSection) -> None:
    tokens = random_tokens()

    assert float(loss_of(tokens, limits).loss) == pytest.approx(naive_loss(tokens, limits))


@with_each_limit
def test_what_is_logged_are_means_over_tokens(limits: TrainSection) -> None:
    tokens = random_tokens()
    largest, limited, kl, importance, total = 0.0, 0.0, 0.0, 0.0, 0.0
    for logp, prox, behaviour, _, weight in zip(*map(listed, tokens), strict=True):
        kept, raw = naive_weight(prox, behaviour, limits), math.exp(prox - behaviour)
        total += weight
        importance += weight * kept
        limited += weight * (abs(kept - raw) > 1e-9)
        largest = max(largest, raw)
        kl += weight * (math.exp(logp - behaviour) - 1 - (logp - behaviour))

    result = loss_of(tokens, limits)
    behaviour_kl = LossMetric(kl_terms(tokens.behaviour, tokens.logprobs, "k3"))
    metrics = {**result.metrics, "behaviour_kl": behaviour_kl}
    found = logged(LossOutput(result.loss, metrics), tokens)

    assert found["importance_mean"] == pytest.approx(importance / total)
    assert found["importance_limited_share"] == pytest.approx(limited / total)
    assert found["importance_max"] == pytest.approx(largest)
    assert found["behaviour_kl"] == pytest.approx(kl / total)


@with_each_limit
def test_the_gradient_is_that_of_finite_differences(limits: TrainSection) -> None:
    tokens = random_tokens(seed=1)
    policy = tokens.logprobs.clone().requires_grad_()

    (gradient,) = torch.autograd.grad(
        loss_of(tokens._replace(logprobs=policy), limits).loss, policy
    )

    step = 1e-6
    for idx in range(len(policy)):
        shift = torch.zeros_like(tokens.logprobs)
        shift[idx] = step
        above = naive_loss(tokens._replace(logprobs=tokens.logprobs + shift), limits)
        below = naive_loss(tokens._replace(logprobs=tokens.logprobs - shift), limits)
        assert float(gradient[idx]) == pytest.approx((above - below) / (2 * step), abs=1e-7)


@with_each_limit
def test_where_the_proximal_policy_made_the_tokens_it_is_the_clipped_loss(
    limits: TrainSection,
) -> None:
    tokens = random_tokens(seed=2)
    tokens = Tokens(*(column.float() for column in tokens))._replace(
        behaviour=tokens.proximal.float()
    )
    policies = [tokens.logprobs.clone().requires_grad_() for _ in range(2)]

    decoupled = loss_of(tokens._replace(logprobs=policies[0]), limits)
    clipped = clipped_loss(policies[1], inputs_of(tokens), limits)

    assert torch.equal(decoupled.loss, clipped.loss)
    for name, metric in clipped.metrics.items():
        assert torch.equal(decoupled.metrics[name].values, metric.values), name
    assert listed(decoupled.metrics["importance_mean"].values) == [1.0] * len(tokens.weights)
    assert not decoupled.metrics["importance_limited_share"].values.any()
    (one,) = torch.autograd.grad(decoupled.loss, policies[0])
    (two,) = torch.autograd.grad(clipped.loss, policies[1])
    assert torch.equal(one, two)


def test_what_the_limits_do_to_weights() -> None:
    raw = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])

    def limited(**limits: Any) -> list[float]:
        return listed(limit_importance(raw, train_settings(importance_cap=2.0, **limits)))

    assert limited() == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert limited(importance_above_cap="mask") == [0.25, 0.5, 1.0, 2.0, 0.0]
    assert limited(importance_floor=0.5) == [0.0, 0.5, 1.0, 2.0, 2.0]
    assert limited(importance_above_cap="mask", importance_floor=0.5) == [0.0, 0.5, 1.0, 2.0, 0.0]


@settings(deadline=None)
@given(
    log_weight=st.floats(-60, 60),
    log_ratio=st.floats(-5, 5),
    advantage=st.floats(-5, 5),
    limits=st.sampled_from(list(LIMITS.values())[1:]),
)
def test_no_age_of_a_token_makes_its_gradient_large(
    log_weight: float, log_ratio: float, advantage: float, limits: TrainSection
) -> None:
    proximal = torch.tensor([-1.0], dtype=torch.float64)
    policy = (proximal + log_ratio).requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    tokens = Tokens(policy, proximal, proximal - log_weight, advantages, torch.ones_like(proximal))

    (gradient,) = torch.autograd.grad(loss_of(tokens, limits).loss, policy)

    # PPO leaves the ratio free where it makes a bad token likelier; no age enters it.
    largest_ratio = 1 + HIGH if advantage > 0 else math.exp(log_ratio)
    assert abs(float(gradient)) <= limits.importance_cap * abs(advantage) * largest_ratio * (
        1 + 1e-9
    )


def test_weighted_tokens_of_an_old_policy_stand_for_tokens_of_the_new_one() -> None:
    """Exactly: the expectation over the old policy's tokens is a sum over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(-1)  # [V]
    logits = torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    new = logits.log_softmax(-1)

    stale = loss_of(Tokens(new, new.detach(), old, advantages, old.exp()))
    (gradient,) = torch.autograd.grad(stale.loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(new.exp() * advantages).sum(), logits)

    torch.testing.assert_close(gradient, wanted)
    expected_weight = (old.exp() * stale.metrics["importance_mean"].values).sum()
    assert float(expected_weight) == pytest.approx(1.0)


def test_old_tokens_are_not_clipped_before_the_policy_moved() -> None:
    old = torch.tensor([-2.0, -2.0])
    policy = torch.tensor([-1.0, -3.0], requires_grad=True)  # far from the old one already
    tokens = Tokens(policy, policy.detach(), old, torch.tensor([1.0, -1.0]), torch.ones(2))

    clipped = clipped_loss(policy, inputs_of(tokens), train_settings())
    decoupled = loss_of(tokens, train_settings())

    (none,) = torch.autograd.grad(clipped.loss, policy)
    (some,) = torch.autograd.grad(decoupled.loss, policy)
    assert listed(none) == [0.0, 0.0]
    assert listed(some) == pytest.approx([-2.0, math.exp(-1.0)])
    assert clipped.metrics["clipped_share"].values.all()
    assert not decoupled.metrics["clipped_share"].values.any()


def test_tokens_without_weight_do_not_show_in_the_largest_weight() -> None:
    proximal = torch.tensor([-1.0, -1.0])
    tokens = Tokens(
        proximal, proximal, torch.tensor([-9.0, -1.5]), torch.ones(2), torch.tensor([0.0, 1.0])
    )

    assert logged(loss_of(tokens), tokens)["importance_max"] == pytest.approx(math.exp(0.5))


def test_importance_weights_of_samples_are_products_or_geometric_means_of_their_tokens() -> None:
    tokens = random_tokens(num_tokens=6)
    lens = [2, 0, 3, 1]
    inputs = replace(inputs_of(tokens), sample_lens=torch.tensor(lens))
    ratios = [
        math.exp(p - b)
        for p, b in zip(listed(tokens.proximal), listed(tokens.behaviour), strict=True)
    ]
    products: list[float] = []
    means: list[float] = []
    for start, length in zip(accumulate(lens, initial=0), lens, strict=False):
        product = math.prod(ratios[start : start + length])
        products += [product] * length
        means += [product ** (1 / length)] * length if length else []

    found = {
        level: listed(importance_ratios(inputs, train_settings(importance_level=level)))
        for level in ("token", "sequence", "geometric", "none")
    }

    assert found["token"] == pytest.approx(ratios)
    assert found["sequence"] == pytest.approx(products)
    assert found["geometric"] == pytest.approx(means)
    assert found["none"] == [1.0] * 6


def test_a_long_samples_weight_is_finite() -> None:
    tokens = random_tokens()
    apart = tokens._replace(behaviour=tokens.behaviour - 50)

    result = loss_of(apart, train_settings(importance_level="sequence"))

    assert math.isfinite(result.loss)
    assert logged(result, apart)["importance_mean"] == 2.0


def test_without_importance_weights_it_is_ppo_around_the_proximal_policy() -> None:
    tokens = random_tokens()
    around = tokens._replace(behaviour=tokens.proximal)

    loss = loss_of(tokens, train_settings(importance_level="none")).loss

    assert float(loss) == pytest.approx(
        float(clipped_loss(around.logprobs, inputs_of(around), NO_LIMITS).loss)
    )
