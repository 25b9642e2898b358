"""Losses that are NaN in the second step of a process, or from there on."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection

_steps_begun = 0


def nan_in_step_2(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    return _nan_if(_count(logprobs) == 2, cispo_loss(logprobs, inputs, settings))


def nan_from_step_2(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    return _nan_if(_count(logprobs) >= 2, cispo_loss(logprobs, inputs, settings))


def _count(logprobs: Tensor) -> int:
    """The step, if each has one micro-batch. A leaf is a look at logprobs, not a step."""
    global _steps_begun
    _steps_begun += not logprobs.is_leaf
    return _steps_begun


def _nan_if(is_nan: bool, output: LossOutput) -> LossOutput:
    return LossOutput(output.loss * torch.nan, output.metrics) if is_nan else output
