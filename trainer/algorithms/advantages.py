"""Advantage estimators: turn the rewards of a group into advantages (`train.advantage`).

| setting | source |
|---|---|
| "grpo" | Shao et al. 2024, arXiv:2402.03300, section 4.1.2 |
| "dr_grpo" | Dr. GRPO, Liu et al. 2025, arXiv:2503.20783: no division by the standard deviation |
| "rloo" | Ahmadian et al. 2024, arXiv:2402.14740 |
| "maxrl" | Tajwar et al. 2026, arXiv:2602.02710 |
| "none" | Thinking Machines 2025, "On-Policy Distillation": the teacher alone teaches |
| "reinforce" | Williams 1992, doi:10.1007/BF00992696 |
| "gdpo" | Liu et al. 2026, arXiv:2601.05242: "grpo" of each of several rewards |
| "gae" | Schulman et al. 2016, arXiv:1506.02438: the reward; `umbra.trainer.critic` calls `gae` |

G: group size; K: rewards that are compared apart, one but for "gdpo"; M: generated tokens of a
micro-batch, sample after sample. What others wrote between a sample's tokens, such as tools, is not
among them: a token's next state is that of the next generated token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import AdvantageEstimator, LossMetric, LossOutput
from umbra.trainer.world.mesh import sum_over_ranks

# The floor keeps the quotient finite. A larger one shrinks advantages of groups that hardly differ;
# below float32 rounding of the rewards, rounding noise grows to full size.
_STD_FLOOR: Final = 1e-4
_ROUNDING: Final = 1e-6


def grpo_advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """(r - mean) / (std + 1e-4). The standard deviation divides by G - 1, as in TRL and verl."""
    centred = _centred(rewards)
    if centred.any():
        centred /= rewards.astype(np.float64).std(ddof=1) + _STD_FLOOR
    return np.asarray(centred, np.float32)


def dr_grpo_advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """r - mean, which does not favour prompts of low variance."""
    return np.asarray(_centred(rewards), np.float32)


def rloo_advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """r - mean of the other samples' rewards, which is G / (G - 1) times (r - mean)."""
    return np.asarray(_centred(rewards) * len(rewards) / (len(rewards) - 1), np.float32)


def maxrl_advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """(r - mean) / mean, for rewards of at least 0: the gradient of the log of the success rate,
    to which rare successes contribute most. 0 where no reward is positive."""
    mean = rewards.mean(dtype=np.float64)
    centred = _centred(rewards)
    return np.asarray(centred / mean if mean > 0 else np.zeros_like(centred), np.float32)


def reinforce_advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """r: no baseline."""
    return rewards


def no_advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """0: rewards are only logged."""
    return np.zeros_like(rewards)


def normalize_over_batch(advantages: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-4) over the samples, or tokens, of all ranks, from this rank's [N].
    Collective; the host waits for no result. REINFORCE++, Hu et al. 2025, arXiv:2501.03262."""
    wide = advantages.double()
    sums = torch.stack([each.sum() for each in (torch.ones_like(wide), wide, wide.square())])
    count, total, squares = sum_over_ranks(sums)
    mean = total / count.clamp(min=1)  # a batch may have no token to train on
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    std = variance.sqrt()
    # The mean of centred advantages is rounding, and their zeros stay exact.
    mean = torch.where(mean.abs() < _ROUNDING * std, 0.0, mean)
    return ((wide - mean) / (std + _STD_FLOOR)).to(advantages.dtype)


def batch_advantages(
    estimate: AdvantageEstimator,
    group_rewards: NDArray[np.float32],
    group_offsets: NDArray[np.int32],
    weights: Sequence[float] = (1.0,),
) -> NDArray[np.float32]:
    """Advantages of whole groups, one after the other: [sum G] from rewards [K, sum G].

    `group_offsets`, [groups + 1], has the start of each group. The advantages of the K rewards add
    up by `weights`. NaN is a reward that does not apply: its sample has no part in that comparison.
    Raises UmbraError if the estimator returned advantages of another shape, or not finite ones.
    """
    advantages = np.zeros(group_rewards.shape[1])
    for weight, row in zip(weights, group_rewards, strict=True):
        for start, stop in pairwise(group_offsets.tolist()):
            applies = start + np.flatnonzero(~np.isnan(row[start:stop]))
            if len(applies):
                advantages[applies] += weight * _estimated(estimate, row[applies])
    return np.asarray(advantages, np.float32)


def _estimated(estimate: AdvantageEstimator, rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    found = np.asarray(estimate(rewards.copy()), np.float32)  # it may compute in place
    if found.shape != rewards.shape or not np.isfinite(found).all():
        raise UmbraError(
            f"train.advantage: the estimator returned {found.tolist()} for the rewards "
            f"{rewards.tolist()}: return one finite number for each"
        )
    return found


def _centred(rewards: NDArray[np.float32]) -> NDArray[np.float64]:
    """r - mean; exactly zero for equal rewards: such a group carries no signal."""
    wide = rewards.astype(np.float64)
    if (wide == wide[0]).all():
        return np.zeros_like(wide)
    return wide - wide.mean()


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
