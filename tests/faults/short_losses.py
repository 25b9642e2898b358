"""A loss for which memory is short once."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection

num_calls = 0


def loss_that_lacks_memory(
    logprobs: Tensor, inputs: LossInputs, settings: TrainSection
) -> LossOutput:
    """In the third call on rank 1, while there is no file `short`."""
    global num_calls
    num_calls += 1
    if num_calls == 3 and os.environ["RANK"] == "1" and not Path("short").exists():
        Path("short").touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return cispo_loss(logprobs, inputs, settings)
