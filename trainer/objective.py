"""The objective of an optimizer step: from the scores of a micro-batch to its share of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput, PolicyLoss
from umbra.trainer.algorithms.losses import kl_terms, kl_to_go
from umbra.trainer.config.algorithm_names import TOKEN_ADVANTAGES
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROLLOUT_LOGPROBS,
    TEACHER_LOGPROBS,
)
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.token_scoring import EntropyUse
from umbra.trainer.model.train_model import TokenScores


class Objective(Protocol):
    """A step calls it once per micro-batch, with scores that have the entropy of `entropy_use`."""

    @property
    def entropy_use(self) -> EntropyUse: ...

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        """The loss, with gradient, and the metrics: "loss" and others."""
        ...


class PolicyObjective:
    """The loss of `train.loss` with its KL term and entropy bonus, and the metrics of all. With
    `kl_in_reward`, the advantages have the KL instead; those of `TOKEN_ADVANTAGES` have it. They
    always have the one to a teacher: its gradient, weighted with the ratio, is that of the reverse
    KL divergence of each token. It is 0 where the teacher has the engines' logprobs, as in samples
    that it was not asked about."""

    def __init__(self, train: TrainSection, loss: PolicyLoss) -> None:
        self._train = train
        self._loss = loss

    @property
    def entropy_use(self) -> EntropyUse:
        train = self._train
        return "trained" if train.entropy_coef else "measured" if train.log_entropy else "none"

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        train, columns = self._train, micro_batch.columns
        proximal = columns[PROXIMAL_LOGPROBS]
        reference = columns.get(REFERENCE_LOGPROBS)
        advantages, of_tokens = columns[ADVANTAGES], train.advantage in TOKEN_ADVANTAGES
        if reference is not None and train.kl_in_reward and not of_tokens:
            penalties = kl_to_go(proximal, reference, micro_batch.sample_lens)
            advantages = advantages - train.kl_coef * penalties
        teacher, sampled = columns.get(TEACHER_LOGPROBS), columns[ROLLOUT_LOGPROBS]
        if teacher is not None:
            teacher = torch.where(teacher == sampled, proximal, teacher)
            advantages = advantages - train.teacher_kl_coef * (proximal - teacher)
        inputs = LossInputs(
            rollout_logprobs=sampled,
            proximal_logprobs=proximal,
            advantages=advantages,
            weights=micro_batch.weights,
            sample_lens=micro_batch.sample_lens,
            columns=columns | {ADVANTAGES: advantages},
        )
        output = self._loss(scores.logprobs, inputs, train)
        _check(output, train.loss)
        loss, metrics = output.loss, dict(output.metrics)
        behaviour_kl = kl_terms(sampled, scores.logprobs.detach(), "k3")
        metrics["behaviour_kl"] = LossMetric(behaviour_kl)
        if scores.entropy is not None:
            metrics["entropy"] = LossMetric(scores.entropy.detach())
            if train.entropy_coef:
                loss = loss - train.entropy_coef * (micro_batch.weights * scores.entropy).sum()
        if teacher is not None:
            metrics["teacher_kl"] = LossMetric(proximal - teacher)
        if reference is not None:
            terms = kl_terms(scores.logprobs, reference, train.kl_estimator)
            metrics["reference_kl"] = LossMetric(terms)
            if not train.kl_in_reward:
                loss = loss + train.kl_coef * (micro_batch.weights * terms).sum()
        return LossOutput(loss, {"loss": LossMetric(loss, "sum")} | metrics)


def _check(output: Any, name: str) -> None:
    """Raises UmbraError unless this is what a loss returns; the host waits for no number."""
    match output:
        case LossOutput(loss=Tensor(ndim=0, requires_grad=True), metrics=Mapping() as metrics) if (
            all(isinstance(each, LossMetric) for each in cast(Any, metrics).values())
        ):
            return
        case LossOutput(loss, metrics):
            found = f"LossOutput({_described(loss)}, {_described(metrics)})"
        case _:
            found = _described(output)
    raise UmbraError(
        f"train.loss = {name!r} returned {found}: return LossOutput(loss, metrics); `loss` is a "
        "scalar with the gradient of the logprobs, such as (inputs.weights * terms).sum(), and "
        "`metrics` a dictionary of LossMetric, or {}"
    )


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r:.80}"
    gradient = "with" if value.requires_grad else "without"
    return f"a tensor of shape {list(value.shape)} {gradient} a gradient"
