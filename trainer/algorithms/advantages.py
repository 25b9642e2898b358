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
| "gae" | the reward, from which `umbra.trainer.critic` makes advantages of tokens |

G: group size; K: rewards that are compared apart, one but for "gdpo".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import AdvantageEstimator
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


def normalize_over_batch(advantages: NDArray[np.float32]) -> NDArray[np.float32]:
    """(A - mean) / (std + 1e-4) over the samples, or tokens, of all ranks, from this rank's [N].
    Collective. REINFORCE++, Hu et al. 2025, arXiv:2501.03262."""
    wide = advantages.astype(np.float64)
    sums = torch.tensor([len(wide), wide.sum(), np.square(wide).sum()], dtype=torch.float64)
    count, total, squares = (float(value) for value in sum_over_ranks(sums))
    mean = total / max(count, 1.0)  # a batch may have no token to train on
    std = math.sqrt(max(0.0, squares - count * mean**2) / max(1.0, count - 1))
    if abs(mean) < _ROUNDING * std:  # of centred advantages, whose zeros stay exact
        mean = 0.0
    return np.asarray((wide - mean) / (std + _STD_FLOOR), np.float32)


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
