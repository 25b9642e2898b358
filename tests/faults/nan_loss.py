"""A loss that is NaN in the second step of a process."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection

_steps_begun = 0


def nan_in_step_2(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Expects one micro-batch for each step. A leaf is a look at logprobs, not a step."""
    global _steps_begun
    _steps_begun += not logprobs.is_leaf
    output = cispo_loss(logprobs, inputs, settings)
    if _steps_begun != 2:
        return output
    return LossOutput(output.loss * torch.nan, output.metrics)
