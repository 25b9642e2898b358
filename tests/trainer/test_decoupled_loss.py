"""The decoupled loss against plain loops in float64, and what holds of it at its limits.

M: tokens; V: vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training_models import listed

from umbra.trainer.algorithms.policy_losses import (
    ImportanceLimits,
    PolicyLoss,
    decoupled_loss,
    limit_importance,
    policy_loss,
)

NO_LIMITS = ImportanceLimits(cap=math.inf)
LOW, HIGH = 0.2, 0.28


class Tokens(NamedTuple):
    """Of random tokens, [M] float64 each."""

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


def loss_of(tokens: Tokens, limits: ImportanceLimits = NO_LIMITS) -> PolicyLoss:
    return decoupled_loss(*tokens, clip_eps_low=LOW, clip_eps_high=HIGH, limits=limits)


def naive_weight(proximal: float, behaviour: float, limits: ImportanceLimits) -> float:
    weight = math.exp(proximal) / math.exp(behaviour)
    if weight < limits.floor:
        return 0.0
    if weight > limits.cap:
        return limits.cap if limits.above_cap == "truncate" else 0.0
    return weight


def naive_loss(tokens: Tokens, limits: ImportanceLimits) -> float:
    total = 0.0
    for logp, prox, behaviour, advantage, weight in zip(*map(listed, tokens), strict=True):
        ratio = math.exp(logp) / math.exp(prox)
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        objective = min(ratio * advantage, clipped * advantage)
        total -= weight * naive_weight(prox, behaviour, limits) * objective
    return total


LIMITS = [
    NO_LIMITS,
    ImportanceLimits(),
    ImportanceLimits(cap=1.0),
    ImportanceLimits(cap=1.5, above_cap="mask"),
    ImportanceLimits(cap=3.0, above_cap="mask", floor=0.5),
    ImportanceLimits(cap=3.0, above_cap="truncate", floor=0.5),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_loss_is_the_papers_formula(limits: ImportanceLimits) -> None:
    tokens = random_tokens()

    assert float(loss_of(tokens, limits).loss) == pytest.approx(naive_loss(tokens, limits))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_what_is_logged_are_means_over_tokens(limits: ImportanceLimits) -> None:
    tokens = random_tokens()
    raw, limited, kl = 0.0, 0.0, 0.0
    expected_mean = 0.0
    for logp, prox, behaviour, _, weight in zip(*map(listed, tokens), strict=True):
        kept, all_of_it = naive_weight(prox, behaviour, limits), math.exp(prox - behaviour)
        expected_mean += weight * kept
        limited += weight * (abs(kept - all_of_it) > 1e-9)
        raw = max(raw, all_of_it)
        kl += weight * (math.exp(logp - behaviour) - 1 - (logp - behaviour))

    result = loss_of(tokens, limits)

    assert float(result.importance) == pytest.approx(expected_mean)
    assert float(result.limited) == pytest.approx(limited)
    assert float(result.importance_max) == pytest.approx(raw)
    assert float(result.behaviour_kl) == pytest.approx(kl)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_gradient_is_that_of_finite_differences(limits: ImportanceLimits) -> None:
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


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_where_the_proximal_policy_made_the_tokens_it_is_the_clipped_loss(
    limits: ImportanceLimits,
) -> None:
    tokens = random_tokens(seed=2)
    tokens = Tokens(*(column.float() for column in tokens))._replace(
        behaviour=tokens.proximal.float()
    )
    policies = [tokens.logprobs.clone().requires_grad_() for _ in range(2)]

    decoupled = loss_of(tokens._replace(logprobs=policies[0]), limits)
    clipped = policy_loss(
        policies[1],
        tokens.behaviour,
        tokens.advantages,
        tokens.weights,
        clip_eps_low=LOW,
        clip_eps_high=HIGH,
    )

    for field in fields(PolicyLoss):
        assert torch.equal(getattr(decoupled, field.name), getattr(clipped, field.name)), field.name
    (one,) = torch.autograd.grad(decoupled.loss, policies[0])
    (two,) = torch.autograd.grad(clipped.loss, policies[1])
    assert torch.equal(one, two)


def test_an_infinite_cap_limits_nothing() -> None:
    tokens = random_tokens()
    raw = (tokens.proximal - tokens.behaviour).exp()

    assert torch.equal(limit_importance(raw, NO_LIMITS), raw)
    assert float(loss_of(tokens).limited) == 0.0


def test_what_the_limits_do_to_weights() -> None:
    raw = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])

    def limited(**limits: Any) -> list[float]:
        return listed(limit_importance(raw, ImportanceLimits(cap=2.0, **limits)))

    assert limited() == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert limited(above_cap="mask") == [0.25, 0.5, 1.0, 2.0, 0.0]
    assert limited(floor=0.5) == [0.0, 0.5, 1.0, 2.0, 2.0]
    assert limited(above_cap="mask", floor=0.5) == [0.0, 0.5, 1.0, 2.0, 0.0]


@settings(deadline=None)
@given(
    log_weight=st.floats(-60, 60),
    log_ratio=st.floats(-5, 5),
    advantage=st.floats(-5, 5),
    limits=st.sampled_from(LIMITS[1:]),
)
def test_no_age_of_a_token_makes_its_gradient_large(
    log_weight: float, log_ratio: float, advantage: float, limits: ImportanceLimits
) -> None:
    proximal = torch.tensor([-1.0], dtype=torch.float64)
    policy = (proximal + log_ratio).requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    tokens = Tokens(policy, proximal, proximal - log_weight, advantages, torch.ones_like(proximal))

    (gradient,) = torch.autograd.grad(loss_of(tokens, limits).loss, policy)

    # PPO leaves the ratio free where it makes a bad token likelier; no age enters it.
    largest_ratio = 1 + HIGH if advantage > 0 else math.exp(log_ratio)
    assert abs(float(gradient)) <= limits.cap * abs(advantage) * largest_ratio * (1 + 1e-9)


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
    assert float(stale.importance) == pytest.approx(1.0)


def test_old_tokens_are_not_clipped_before_the_policy_moved() -> None:
    old = torch.tensor([-2.0, -2.0])
    policy = torch.tensor([-1.0, -3.0], requires_grad=True)  # far from the old one already
    advantages, weights = torch.tensor([1.0, -1.0]), torch.ones(2)
    epsilons = {"clip_eps_low": LOW, "clip_eps_high": HIGH}

    clipped = policy_loss(policy, old, advantages, weights, **epsilons)
    decoupled = loss_of(
        Tokens(policy, policy.detach(), old, advantages, weights), ImportanceLimits()
    )

    (none,) = torch.autograd.grad(clipped.loss, policy)
    (some,) = torch.autograd.grad(decoupled.loss, policy)
    assert listed(none) == [0.0, 0.0]
    assert listed(some) == pytest.approx([-2.0, math.exp(-1.0)])
    assert (float(clipped.clipped), float(decoupled.clipped)) == (2.0, 0.0)


def test_tokens_without_weight_do_not_show_in_the_largest_weight() -> None:
    proximal = torch.tensor([-1.0, -1.0])
    tokens = Tokens(
        proximal, proximal, torch.tensor([-9.0, -1.5]), torch.ones(2), torch.tensor([0.0, 1.0])
    )

    assert float(loss_of(tokens).importance_max) == pytest.approx(math.exp(0.5))
