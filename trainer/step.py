from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.runtime.tracing.spans import span
from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput, PolicyLoss
from umbra.trainer.algorithms.metric_totals import MetricTotals
from umbra.trainer.algorithms.token_terms import kl_terms
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.model.micro_batches import MicroBatch, MicroBatchBuilder, RankBatch
from umbra.trainer.model.train_model import POLICY, REFERENCE, TrainModel


@dataclass(slots=True)
class _Part:
    """A micro-batch and its tokens' logprobs under other policies: [M], without gradient."""

    micro_batch: MicroBatch
    reference_logprobs: Tensor | None  # under the starting model; None without a KL term
    # Under the policy at the beginning of the step; None before the first update, which computes
    # them for the whole batch.
    proximal_logprobs: Tensor | None = None


class TrainStep:
    """Does one optimizer step (or a few) on one batch: forward, backward, clip, step. Every rank
    has one; `run` is collective. `models` has the frozen starting model as the reference, unless
    `kl_coef` is 0; `check` is None where the batches are not an engine's."""

    def __init__(
        self,
        models: Mapping[str, TrainModel],
        builder: MicroBatchBuilder,
        train: TrainSection,
        loss: PolicyLoss,
        check: LogprobCheck | None = None,
    ) -> None:
        self._policy = models[POLICY]
        self._reference = models.get(REFERENCE)
        self._builder = builder
        self._train = train
        self._loss = loss
        self._check = check

    def run(self, batch: RankBatch, step: int) -> dict[str, float]:
        """Trains on `batch` as step `step` (from 0); returns `train/...` and `time/...` metrics.
        Raises UmbraError on every rank, with parameters unchanged, if the gradient is not finite,
        or engines and trainer compute different models."""
        with span("train") as train:
            metrics = self._update(batch, step)
        return metrics | {"time/train_s": train.seconds}

    def _update(self, batch: RankBatch, step: int) -> dict[str, float]:
        reference = self._reference
        parts = [
            _Part(micro_batch, None if reference is None else reference.logprobs(micro_batch))
            for micro_batch in self._builder.build(batch)
        ]
        metrics: dict[str, float] = {}
        for update in range(self._train.updates_per_batch):
            with span("forward and backward", micro_batches=len(parts)):
                totals = self._accumulate(parts)
            if update == 0:
                metrics = self._compared(batch, parts, step)
            with span("optimizer"):
                applied = self._policy.step(step)
            if not math.isfinite(applied["grad_norm"]):
                raise UmbraError(
                    f"step {step + 1}: the gradient is not finite (norm {applied['grad_norm']}); "
                    "the parameters are unchanged: lower train.learning_rate or "
                    "train.clip_eps_high, or compute in float32 (model.dtype)"
                )
            if update == 0:
                metrics |= {f"train/{name}": value for name, value in totals.reduce().items()}
            metrics |= {f"train/{name}": value for name, value in applied.items()}
        return metrics

    def _compared(self, batch: RankBatch, parts: Sequence[_Part], step: int) -> dict[str, float]:
        """Metrics of the comparison with the engines, before a parameter has changed."""
        if self._check is None:
            return {}
        scored = [
            (part.micro_batch, part.proximal_logprobs)
            for part in parts
            if part.proximal_logprobs is not None
        ]
        return self._check.run(batch, scored, step)

    def _accumulate(self, parts: Sequence[_Part]) -> MetricTotals:
        """Computes the gradients of the whole batch; returns this rank's part of the metrics."""
        totals = MetricTotals()
        for idx, part in enumerate(parts, 1):
            self._backward(part, totals, is_last=idx == len(parts))
        return totals

    def _backward(self, part: _Part, totals: MetricTotals, *, is_last: bool) -> None:
        """Frees the graph when it returns: the next micro-batch needs the memory."""
        output = self._evaluate(part)
        self._policy.backward(output.loss, is_last=is_last)
        totals.add(output.metrics, part.micro_batch.weights)

    def _evaluate(self, part: _Part) -> LossOutput:
        """The loss with its KL term, and the metrics of both."""
        train, micro_batch = self._train, part.micro_batch
        scores = self._policy.score(micro_batch, with_entropy=train.log_entropy)
        if part.proximal_logprobs is None:
            part.proximal_logprobs = scores.logprobs.detach()
        inputs = LossInputs(
            rollout_logprobs=micro_batch.rollout_logprobs,
            proximal_logprobs=part.proximal_logprobs,
            advantages=micro_batch.advantages,
            weights=micro_batch.weights,
            sample_lens=micro_batch.sample_lens,
        )
        output = self._loss(scores.logprobs, inputs, train)
        loss, metrics = output.loss, dict(output.metrics)
        behaviour_kl = kl_terms(micro_batch.rollout_logprobs, scores.logprobs.detach(), "k3")
        metrics["behaviour_kl"] = LossMetric(behaviour_kl)
        if scores.entropy is not None:
            metrics["entropy"] = LossMetric(scores.entropy)
        if part.reference_logprobs is not None:
            terms = kl_terms(scores.logprobs, part.reference_logprobs, train.kl_estimator)
            loss = loss + train.kl_coef * (micro_batch.weights * terms).sum()
            metrics["reference_kl"] = LossMetric(terms)
        return LossOutput(loss, {"loss": LossMetric(loss, "sum")} | metrics)
