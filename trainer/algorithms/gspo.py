"""Group Sequence Policy Optimization, Zheng et al. 2025, arXiv:2507.18071.

The ratio is that of whole samples, to the power of 1 / length, and is clipped per sample. With
`train.loss_aggregation = "sequence"` and group advantages this is the paper's eq. 5 to 7. Such a
ratio stays much closer to 1 than a token's: the paper clips at 3e-4 below and 4e-4 above.

M: generated tokens of a micro-batch; N: samples of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossOutput
from umbra.trainer.algorithms.clipped_loss import clipped_surrogate
from umbra.trainer.config.trainer_config import TrainSection


def gspo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """See `PolicyLoss`.

    Metrics: `ratio_mean` of the samples' ratios, and `clipped_share` of tokens in samples whose
    gradient the clip removed.
    """
    lens = inputs.sample_lens
    log_ratios = torch.segment_reduce(  # [N], eq. 7
        logprobs - inputs.rollout_logprobs, "mean", lengths=lens, initial=0.0
    )
    of_tokens = torch.repeat_interleave(log_ratios, lens, output_size=len(logprobs))
    terms = clipped_surrogate(of_tokens, inputs.advantages, settings)
    loss = -(inputs.weights * terms.objective).sum()
    return LossOutput(loss, terms.metrics())
