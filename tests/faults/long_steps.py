"""Losses that make a step long: they wait for, or because of, a file in the current folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection


def waiting_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    Path("waiting").touch()
    while not Path("go_on").exists():
        time.sleep(0.02)
    return cispo_loss(logprobs, inputs, settings)


def held_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Waits while there is a file `held`."""
    while Path("held").exists():
        Path("waiting").touch()
        time.sleep(0.02)
    return cispo_loss(logprobs, inputs, settings)


def loss_that_waits_on_rank_1(
    logprobs: Tensor, inputs: LossInputs, settings: TrainSection
) -> LossOutput:
    """The other ranks wait for it in a collective."""
    if os.environ["RANK"] == "1":
        return waiting_loss(logprobs, inputs, settings)
    return cispo_loss(logprobs, inputs, settings)
