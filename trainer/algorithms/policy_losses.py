"""Losses of the GRPO family. Pure functions over flat vectors, one entry per generated token.

M: generated tokens of a micro-batch; N: samples of a micro-batch.

| setting | source |
|---|---|
| clipped ratio | PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7 |
| group advantages, k3 term in the loss, "sequence" | GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4 |
| clip_eps_high above clip_eps_low, "token" | DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
| no division by length or deviation, "constant" | Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 |
| k1, k2, k3 | Schulman 2020, http://joschu.net/blog/kl-approx.html |
| decoupled objective | Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.2 |
| importance weights, "truncate" | TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" |
| importance weights, "mask", floor | IcePop, Ling Team 2025, arXiv:2510.18855: weights outside of a range count as 0 |

Three policies matter where tokens are older than the weights being trained: the behaviour policy
sampled a token, the proximal policy is the one at the beginning of the step, and the current one
is being optimised. Clipping holds the current policy near an anchor. With the behaviour policy as
the anchor ("clipped"), old tokens may be clipped before the first update has moved anything; with
the proximal one ("decoupled"), their age is the matter of an importance weight alone.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
AboveCap = Literal["truncate", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceLimits:
    """What becomes of extreme importance weights.

    Attributes:
        cap: at least 1; infinite limits nothing.
        above_cap: "truncate" makes larger weights the cap, "mask" makes them 0. Masked tokens
            still count where a loss is divided by a number of tokens.
        floor: smaller weights become 0; below 1.
    """

    cap: float = 2.0
    above_cap: AboveCap = "truncate"
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of a micro-batch and what to log of it; every entry is a scalar.

    Attributes:
        loss: to be differentiated; sums over micro-batches and ranks to the global loss.
        clipped: weighted share of tokens whose gradient the clip cut off.
        ratio: weighted mean of the probability ratio.
        behaviour_kl: weighted mean of the k3 estimate of KL(behaviour || policy).
        importance: weighted mean of the importance weights, as limited.
        limited: weighted share of tokens whose importance weight was truncated or masked.
        importance_max: largest importance weight before the limits, of tokens with weight; like
            the mean, it is of ones where the loss has no importance weights.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    behaviour_kl: Tensor
    importance: Tensor
    limited: Tensor
    importance_max: Tensor


def token_weights(
    sample_lens: Tensor,
    aggregation: Aggregation,
    *,
    num_tokens_global: int,
    num_samples_global: int,
    max_new_tokens: int,
) -> Tensor:
    """How much each token counts in the global loss, repeated per token: [M] float32.

    "token": every token of the global batch the same, so long samples count more.
    "sequence": every sample the same; its tokens share its weight.
    "constant": divides by the token budget, which favours neither; the sum depends on lengths.

    Args:
        sample_lens: [N] int64, generated tokens of each sample; sums to M.
    """
    match aggregation:
        case "token":
            per_sample = torch.full_like(sample_lens, 1.0 / num_tokens_global, dtype=torch.float32)
        case "sequence":
            per_sample = 1.0 / (num_samples_global * sample_lens.clamp(min=1).float())
        case "constant":
            share = 1.0 / (num_samples_global * max_new_tokens)
            per_sample = torch.full_like(sample_lens, share, dtype=torch.float32)
        case _:
            assert_never(aggregation)
    return torch.repeat_interleave(per_sample, sample_lens)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated.

    Args:
        logprobs: [M] of the tokens under the policy, with gradient.
        old_logprobs: [M] under the policy that sampled them.
        advantages, weights: [M].
    """
    terms = _clipped_terms(logprobs, old_logprobs, advantages, clip_eps_low, clip_eps_high)
    loss = -(weights * terms.objective).sum()
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clipped=(weights * terms.is_clipped).sum(),
            ratio=(weights * terms.ratio).sum(),
            behaviour_kl=(weights * _k3(logprobs - old_logprobs)).sum(),
            importance=weights.sum(),
            limited=torch.zeros_like(loss),
            importance_max=torch.ones_like(loss),
        )


def decoupled_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    limits: ImportanceLimits,
) -> PolicyLoss:
    """The clipped surrogate around the proximal policy, negated; for tokens of older policies.

    Each token counts by its importance weight, proximal / behaviour, which has no gradient: with
    it, the tokens stand for tokens that the proximal policy would have sampled. Where the two are
    equal, this is `policy_loss`.

    Args:
        logprobs: [M] of the tokens under the policy, with gradient.
        proximal_logprobs: [M] under the policy at the beginning of the step, without gradient.
        behaviour_logprobs: [M] under the policies that sampled them.
        advantages, weights: [M].
    """
    terms = _clipped_terms(logprobs, proximal_logprobs, advantages, clip_eps_low, clip_eps_high)
    raw = (proximal_logprobs - behaviour_logprobs).exp()
    importance = limit_importance(raw, limits)
    loss = -(weights * importance * terms.objective).sum()
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clipped=(weights * terms.is_clipped).sum(),
            ratio=(weights * terms.ratio).sum(),
            behaviour_kl=(weights * _k3(logprobs - behaviour_logprobs)).sum(),
            importance=(weights * importance).sum(),
            limited=(weights * (importance != raw)).sum(),
            importance_max=torch.where(weights > 0, raw, 0.0).max(),
        )


def limit_importance(raw: Tensor, limits: ImportanceLimits) -> Tensor:
    """Importance weights within the limits: [M], from [M] ratios of probabilities."""
    match limits.above_cap:
        case "truncate":
            limited = raw.clamp(max=limits.cap)
        case "mask":
            limited = torch.where(raw > limits.cap, 0.0, raw)
        case _:
            assert_never(limits.above_cap)
    return torch.where(raw < limits.floor, 0.0, limited)


def kl_terms(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens of the policy: [M].

    With log_ratio = log p_ref - log p: k1 = -log_ratio (unbiased, negative at times; as a loss
    its expected gradient is zero), k2 = log_ratio^2 / 2 (biased, its gradient is that of the KL),
    k3 = exp(log_ratio) - 1 - log_ratio (unbiased, never negative; what GRPO uses).
    """
    log_ratio = reference_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return _k3(log_ratio)
        case _:
            assert_never(estimator)


@dataclass(frozen=True, slots=True)
class _ClippedTerms:
    """PPO's surrogate of each token, to be maximised; all are [M]."""

    objective: Tensor
    ratio: Tensor
    is_clipped: Tensor


def _clipped_terms(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> _ClippedTerms:
    ratio = (logprobs - anchor).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages
    return _ClippedTerms(torch.minimum(free, bounded), ratio, bounded < free)


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1.0 - log_ratio
