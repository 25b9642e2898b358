"""Advantages from a critic's values: generalized advantage estimation, Schulman et al. 2016,
arXiv:1506.02438; and the critic's loss.

M: generated tokens of a micro-batch, sample after sample; N: its samples. What others wrote between
a sample's tokens, such as tools, is not among them: a token's next state is that of the next
generated token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.trainer.algorithms.base import LossMetric, LossOutput


def gae(rewards: Tensor, values: Tensor, sample_lens: Tensor, gamma: float, lam: float) -> Tensor:
    """[M] float64: the sum of (gamma lam)^k delta over a token and the later ones of its sample,
    with delta = reward + gamma * the next token's value - value, eq. 16. `rewards` and `values` are
    [M]; the value after a sample's last token is 0."""
    rewards, values = rewards.double(), values.double()
    following = torch.where(_num_later(sample_lens, len(values)) > 0, values.roll(-1), 0.0)
    return sums_to_go(rewards + gamma * following - values, sample_lens, gamma * lam)


def rewards_at_ends(rewards: Tensor, sample_lens: Tensor) -> Tensor:
    """[M] with a sample's reward at its last token, from [M] with it at each."""
    return torch.where(_num_later(sample_lens, len(rewards)) == 0, rewards, 0.0)


def sums_to_go(terms: Tensor, sample_lens: Tensor, discount: float = 1.0) -> Tensor:
    """[M] float64: the sum of discount^k times the term of the k-th token from each on, within its
    sample. Each pass doubles the number of terms in a sum; the host waits for no result."""
    num_later, sums, num_summed = _num_later(sample_lens, len(terms)), terms.double(), 1
    while num_summed < len(terms):
        later = F.pad(sums[num_summed:], (0, num_summed))
        sums = sums + torch.where(num_later >= num_summed, discount**num_summed * later, 0.0)
        num_summed *= 2
    return sums


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, clip: float
) -> LossOutput:
    """Half the squared error of `values`, [M] with gradient. With a `clip`, the larger one of it
    and of the error of the values moved by at most that from `old`, those before the step, so that
    a value gains nothing by moving further. Metrics: `clipped_share` of tokens without gradient."""
    errors = (values - returns).square()
    is_clipped = torch.zeros_like(errors, dtype=torch.bool)
    if clip:
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        is_clipped = bounded > errors
        errors = torch.maximum(errors, bounded)
    loss = 0.5 * (weights * errors).sum()
    return LossOutput(loss, {"clipped_share": LossMetric(is_clipped)})


def _num_later(sample_lens: Tensor, num_tokens: int) -> Tensor:
    """[M] int64, the tokens of its sample that follow each."""
    ends = torch.repeat_interleave(sample_lens.cumsum(0), sample_lens, output_size=num_tokens)
    return ends - 1 - torch.arange(num_tokens, device=sample_lens.device)
