"""PPO's clipped surrogate: the ratio to the policies that sampled the tokens, clipped.

| setting | source |
|---|---|
| clipped ratio | PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7 |
| `clip_eps_high` above `clip_eps_low` | DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |

M: generated tokens of a micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.config.trainer_config import TrainSection


def clipped_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """See `PolicyLoss`.

    Metrics: `ratio_mean`, and `clipped_share` of tokens whose gradient the clip removed.
    """
    terms = clipped_surrogate(logprobs - inputs.rollout_logprobs, inputs.advantages, settings)
    loss = -(inputs.weights * terms.objective).sum()
    return LossOutput(loss, terms.metrics())


class ClippedSurrogate(NamedTuple):
    """PPO's surrogate of each token, to be maximised; all are [M]."""

    objective: Tensor
    ratio: Tensor
    is_clipped: Tensor

    def metrics(self) -> dict[str, LossMetric]:
        return {
            "clipped_share": LossMetric(self.is_clipped),
            "ratio_mean": LossMetric(self.ratio),
        }


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, settings: TrainSection
) -> ClippedSurrogate:
    """The clipped surrogate of each token; `log_ratio`, [M], has the gradient."""
    ratio = log_ratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high) * advantages
    return ClippedSurrogate(torch.minimum(free, bounded), ratio, bounded < free)
