"""A critic's part of a step: advantages and returns of each token, and its own objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from umbra.trainer.algorithms.advantages import (
    gae,
    normalize_over_batch,
    rewards_at_ends,
    value_loss,
)
from umbra.trainer.algorithms.base import LossMetric, LossOutput
from umbra.trainer.config.trainer_config import CriticSection, TrainSection
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    VALUES,
)
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.token_scoring import EntropyUse
from umbra.trainer.model.train_model import TokenScores
from umbra.trainer.world.mesh import sum_over_ranks

_ROUNDING: Final = 1e-9
"""Returns are all the same if their variance is a smaller share of their and their errors' squares,
from which they have been computed."""


class ValueObjective:
    """An `Objective`: the error of the values to the batch's returns."""

    entropy_use: EntropyUse = "none"

    def __init__(self, clip: float) -> None:
        self._clip = clip

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        columns = micro_batch.columns
        output = value_loss(
            scores.logprobs, columns[VALUES], columns[RETURNS], micro_batch.weights, self._clip
        )
        loss = LossMetric(output.loss, "sum")
        return LossOutput(output.loss, {"loss": loss, **output.metrics})


def add_gae(
    micro_batches: Sequence[MicroBatch], critic: CriticSection, train: TrainSection
) -> Callable[[], dict[str, float]]:
    """Puts advantages in the place of the samples' rewards, and adds the returns that values are to
    become, from the critic's values before the step. With `train.kl_in_reward`, each token's reward
    has its KL. Collective; the host waits for no result. What it returns waits, and returns metrics
    of the values."""
    for micro_batch in micro_batches:
        columns, lens = micro_batch.columns, micro_batch.sample_lens
        rewards = rewards_at_ends(columns[ADVANTAGES], lens)
        if train.kl_in_reward and train.kl_coef:
            kl = columns[PROXIMAL_LOGPROBS] - columns[REFERENCE_LOGPROBS]
            rewards = rewards - train.kl_coef * kl
        values = columns[VALUES]
        of_returns = gae(rewards, values, lens, critic.gamma, critic.returns_lam)
        advantages = gae(rewards, values, lens, critic.gamma, critic.lam)
        columns[RETURNS] = (values + of_returns).to(values.dtype)
        columns[ADVANTAGES] = advantages.to(values.dtype)
    if train.advantage_norm == "batch":
        whole = normalize_over_batch(_whole(micro_batches, ADVANTAGES))
        for micro_batch in micro_batches:
            num_tokens = len(micro_batch.places)
            micro_batch.columns[ADVANTAGES][:num_tokens] = whole[:num_tokens]
            whole = whole[num_tokens:]
    returns = _whole(micro_batches, RETURNS).double()
    errors = returns - _whole(micro_batches, VALUES)
    moments = (torch.ones_like(returns), returns, returns.square(), errors, errors.square())
    sums = sum_over_ranks(torch.stack([each.sum() for each in moments]))
    return partial(_metrics, sums)


def _whole(micro_batches: Sequence[MicroBatch], name: str) -> Tensor:
    """A column of all micro-batches, without padding."""
    return torch.cat([each.columns[name][: len(each.places)] for each in micro_batches])


def _metrics(sums: Tensor) -> dict[str, float]:
    """Means over all tokens, and the share of the returns' variance that the values explain."""
    count, *totals = (float(each) for each in sums.cpu())
    if not count:
        return {}
    mean, square, error, squared_error = (total / count for total in totals)
    variance, unexplained = square - mean**2, squared_error - error**2
    metrics = {"critic/return_mean": mean, "critic/value_mean": mean - error}
    if variance > _ROUNDING * (square + squared_error):
        metrics["critic/explained_variance"] = 1 - unexplained / variance
    return metrics
