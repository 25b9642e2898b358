"""A token's terms in the loss: its estimate of the KL divergence, and its weight.

k2 and k3 are from Schulman 2020, http://joschu.net/blog/kl-approx.html; GRPO has k3 in the loss
(Shao et al. 2024, arXiv:2402.03300, eq. 4). M: generated tokens of a micro-batch; N: its samples.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

KlEstimator = Literal["k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]


def kl_terms(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens of the policy: [M].

    With log_ratio = log p_ref - log p: k2 = log_ratio^2 / 2 (biased, but its gradient is the KL's),
    k3 = exp(log_ratio) - 1 - log_ratio (unbiased, never negative). k1 = -log_ratio is no loss: its
    expected gradient is zero.
    """
    log_ratio = reference_logprobs - logprobs
    match estimator:
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return log_ratio.exp() - 1.0 - log_ratio
        case _:
            assert_never(estimator)


def token_weights(
    sample_lens: Tensor,
    aggregation: Aggregation,
    *,
    num_tokens_global: int,
    num_samples_global: int,
    max_new_tokens: int,
) -> Tensor:
    """[M] float32, each token's weight in the global loss; `sample_lens`, [N] int64, sums to M.

    | setting | source |
    |---|---|
    | "sequence" | GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3 |
    | "token" | DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
    | "constant" | Dr. GRPO, Liu et al. 2025, arXiv:2503.20783: no division by length |

    "token": all tokens of the global batch weigh the same, so long samples weigh more.
    "sequence": all samples weigh the same; the tokens of one share its weight.
    "constant": divides by the token budget, which favours neither; the sum depends on lengths.
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
