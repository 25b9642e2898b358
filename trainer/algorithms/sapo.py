from __future__ import annotations

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.config.algorithm_names import LOSS_ARGS
from umbra.trainer.config.trainer_config import TrainSection


def sapo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Soft Adaptive Policy Optimization, Gao et al. 2025, arXiv:2511.20347.

    A sigmoid of the ratio takes the clip's place: sigmoid(tau (ratio - 1)) 4 / tau, whose slope is
    1 at a ratio of 1 and falls to both sides. tau is `tau_positive` for positive advantages and
    `tau_negative` for the others, of `train.loss_args`. Metrics: `ratio_mean`, and `gate_mean` of
    the slopes, 1 where the ratio is 1.
    """
    taus = {**LOSS_ARGS["sapo"], **settings.loss_args}
    ratio = (logprobs - inputs.rollout_logprobs).exp()
    tau = torch.where(inputs.advantages > 0, taus["tau_positive"], taus["tau_negative"])
    gate = torch.sigmoid(tau * (ratio - 1.0))
    loss = -(inputs.weights * 4.0 / tau * gate * inputs.advantages).sum()
    slope = (4.0 * gate * (1.0 - gate)).detach()
    metrics = {"ratio_mean": LossMetric(ratio.detach()), "gate_mean": LossMetric(slope)}
    return LossOutput(loss, metrics)
