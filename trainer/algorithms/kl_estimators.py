"""Estimates of the KL divergence of two policies from tokens of the first: `train.kl_estimator`.

| setting | source |
|---|---|
| k2, k3 | Schulman 2020, http://joschu.net/blog/kl-approx.html |
| k3 term in the loss | GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 4 |

M: generated tokens of a micro-batch.
"""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

KlEstimator = Literal["k2", "k3"]


def kl_terms(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens of the policy: [M].

    With log_ratio = log p_ref - log p: k2 = log_ratio^2 / 2 (biased, its gradient is that of the
    KL), k3 = exp(log_ratio) - 1 - log_ratio (unbiased, never negative; what GRPO uses). k1 =
    -log_ratio is no loss: its expected gradient is zero.
    """
    log_ratio = reference_logprobs - logprobs
    match estimator:
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return log_ratio.exp() - 1.0 - log_ratio
        case _:
            assert_never(estimator)
