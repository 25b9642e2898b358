from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.config.trainer_config import TrainSection

_MAX_RATIO: Final = 20.0
"""Without it, a token whose probability rises from 1e-5 to 0.1 would outweigh a whole batch."""


def dppo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Divergence PPO with the binary total variation, Qi et al. 2026, arXiv:2602.04879.

    A token leaves the loss where its probability has moved too far from the one that it was sampled
    with, and would move on: up by more than `train.clip_eps_high` with a positive advantage, down
    by more than `train.clip_eps_low` with another. PPO's bound on the ratio stops rare tokens
    early and frequent ones late. A token's importance weight, the ratio without gradient, is at
    most 20. Metrics: `ratio_mean`, and `clipped_share` of tokens left out.
    """
    ratio = (logprobs.detach() - inputs.rollout_logprobs).exp()
    moved = (logprobs.detach().exp() - inputs.rollout_logprobs.exp()).float()
    is_left_out = torch.where(
        inputs.advantages > 0, moved > settings.clip_eps_high, moved < -settings.clip_eps_low
    )
    importance = torch.where(is_left_out, 0.0, ratio.clamp(max=_MAX_RATIO))
    loss = -(inputs.weights * importance * inputs.advantages * logprobs).sum()
    metrics = {"clipped_share": LossMetric(is_left_out), "ratio_mean": LossMetric(ratio)}
    return LossOutput(loss, metrics)
