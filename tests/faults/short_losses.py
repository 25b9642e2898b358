"""Losses that do something in their third call, which is in the third step."""

from __future__ import annotations

import os
from pathlib import Path

from long_steps import waiting_loss
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection

num_calls = 0


def is_third() -> bool:
    global num_calls
    num_calls += 1
    return num_calls == 3


def loss_that_waits(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    loss = waiting_loss if is_third() else cispo_loss
    return loss(logprobs, inputs, settings)


def loss_that_lacks_memory(
    logprobs: Tensor, inputs: LossInputs, settings: TrainSection
) -> LossOutput:
    """On rank 1, while there is no file `short`: cuBLAS's error, not of torch's type."""
    if is_third() and os.environ["RANK"] == "1" and not Path("short").exists():
        Path("short").touch()
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    return cispo_loss(logprobs, inputs, settings)
