"""CISPO, clipped importance sampling: MiniMax-M1, MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.

The clip limits a token's importance weight but never removes its gradient, so that rare important
tokens count. The paper has no lower bound, which is `train.clip_eps_low = 1`, and weights every
token equally, which is `train.loss_aggregation = "token"`.

M: generated tokens of a micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.config.trainer_config import TrainSection


def cispo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """See `PolicyLoss`.

    Metrics: `ratio_mean` before the clip, and `clipped_share` of tokens whose ratio was clipped.
    """
    ratio = (logprobs.detach() - inputs.rollout_logprobs).exp()
    clipped = ratio.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high)
    loss = -(inputs.weights * clipped * inputs.advantages * logprobs).sum()
    metrics = {"clipped_share": LossMetric(clipped != ratio), "ratio_mean": LossMetric(ratio)}
    return LossOutput(loss, metrics)
