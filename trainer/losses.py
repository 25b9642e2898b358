"""Losses of the GRPO family. Pure functions over flat vectors, one entry per generated token.

M: generated tokens of a micro-batch; N: samples of a micro-batch.

| setting | source |
|---|---|
| clipped ratio | PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7 |
| group advantages, k3 term in the loss, "sequence" | GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4 |
| clip_eps_high above clip_eps_low, "token" | DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
| no division by length or deviation, "constant" | Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 |
| k1, k2, k3 | Schulman 2020, http://joschu.net/blog/kl-approx.html |
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of a micro-batch and what to log of it; every entry is a scalar.

    Attributes:
        loss: to be differentiated; sums over micro-batches and ranks to the global loss.
        clipped: weighted share of tokens whose gradient the clip cut off.
        ratio: weighted mean of the probability ratio.
        behaviour_kl: weighted mean of the k3 estimate of KL(behaviour || policy).
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    behaviour_kl: Tensor


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
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    free = ratio * advantages
    bounded = clipped_ratio * advantages
    loss = -(weights * torch.minimum(free, bounded)).sum()
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            clipped=(weights * (bounded < free)).sum(),
            ratio=(weights * ratio).sum(),
            behaviour_kl=(weights * (ratio - 1.0 - log_ratio)).sum(),
        )


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
            return log_ratio.exp() - 1.0 - log_ratio
        case _:
            assert_never(estimator)
