"""Losses that wait for a file in the current folder, or go wrong in a certain step of a process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.losses import cispo_loss
from umbra.trainer.config.trainer_config import TrainSection

_num_calls = 0


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


def waits_on_rank_1(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """The other ranks wait for it in a collective."""
    loss = waiting_loss if os.environ["RANK"] == "1" else cispo_loss
    return loss(logprobs, inputs, settings)


def waits_in_step_3(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    loss = waiting_loss if _step(logprobs) == 3 else cispo_loss
    return loss(logprobs, inputs, settings)


def lacks_memory_in_step_3(
    logprobs: Tensor, inputs: LossInputs, settings: TrainSection
) -> LossOutput:
    """On rank 1, of its first two processes: cuBLAS's error, not of torch's type."""
    if _step(logprobs) == 3 and os.environ["RANK"] == "1" and not Path("short 2").exists():
        Path("short 2" if Path("short 1").exists() else "short 1").touch()
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    return cispo_loss(logprobs, inputs, settings)


def nan_in_step_2(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    return _nan_if(_step(logprobs) == 2, cispo_loss(logprobs, inputs, settings))


def nan_from_step_2(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    return _nan_if(_step(logprobs) >= 2, cispo_loss(logprobs, inputs, settings))


def _step(logprobs: Tensor) -> int:
    """The step, if each has one micro-batch. A leaf is a look at logprobs, not a step."""
    global _num_calls
    _num_calls += not logprobs.is_leaf
    return _num_calls


def _nan_if(is_nan: bool, output: LossOutput) -> LossOutput:
    return LossOutput(output.loss * torch.nan, output.metrics) if is_nan else output
