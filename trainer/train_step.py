"""One optimizer step (or a few) from one batch: forward, backward, clip, step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.batch import MicroBatch, MicroBatchBuilder, RankBatch
from umbra.trainer.config import TrainSection
from umbra.trainer.losses import kl_terms, policy_loss
from umbra.trainer.optimizer import PolicyOptimizer
from umbra.trainer.policy import Policy
from umbra.trainer.world import sum_over_ranks

# What micro-batches and ranks add up, in this order.
_SUMS = ("weight", "loss", "clipped_share", "ratio_mean", "behaviour_kl", "entropy", "reference_kl")


class TrainStep:
    """Turns a rank's batch into updated parameters. Every rank has one; `run` is collective.

    Args:
        reference: frozen starting model for the KL term; None where `kl_coef` is 0.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        builder: MicroBatchBuilder,
        train: TrainSection,
        reference: Policy | None = None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._builder = builder
        self._train = train
        self._reference = reference

    def run(self, batch: RankBatch, step: int) -> dict[str, float]:
        """Trains on `batch` as step `step` (from 0); returns `train/...` and `time/...` metrics.

        Raises:
            UmbraError: the gradient is not finite, on every rank; parameters are as before.
        """
        started = time.perf_counter()
        micro_batches = self._builder.build(batch)
        references = [self._reference_logprobs(micro_batch) for micro_batch in micro_batches]
        metrics: dict[str, float] = {}
        for update in range(self._train.updates_per_batch):
            sums = self._accumulate(micro_batches, references)
            applied = self._optimizer.step(step)
            if not math.isfinite(applied["grad_norm"]):
                raise UmbraError(
                    f"step {step + 1}: the gradient is not finite (norm {applied['grad_norm']}); "
                    "the parameters are unchanged: lower train.learning_rate or "
                    "train.clip_eps_high, or compute in float32 (model.dtype)"
                )
            if update == 0:
                metrics = self._means(sum_over_ranks(sums))
            metrics |= {f"train/{name}": value for name, value in applied.items()}
        metrics["time/train_s"] = time.perf_counter() - started
        return metrics

    def _means(self, sums: Tensor) -> dict[str, float]:
        """Token means by the loss's own weights; the loss itself is a sum."""
        weight, loss, *rest = (float(value) for value in sums)
        means = {
            name: value / weight if weight else 0.0
            for name, value in zip(_SUMS[2:], rest, strict=True)
        }
        if self._reference is None:
            del means["reference_kl"]
        if not self._train.log_entropy:
            del means["entropy"]
        return {f"train/{name}": value for name, value in ({"loss": loss} | means).items()}

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch], references: Sequence[Tensor | None]
    ) -> Tensor:
        """Gradients of the whole batch; this rank's part of `_SUMS`, [7] float64."""
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self._builder.device)
        for idx, (micro_batch, reference) in enumerate(
            zip(micro_batches, references, strict=True), 1
        ):
            self._policy.expect_backward(is_last=idx == len(micro_batches))
            loss, parts = self._loss(micro_batch, reference)
            torch.autograd.backward(loss)
            sums += parts
        return sums

    def _loss(
        self, micro_batch: MicroBatch, reference_logprobs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        train = self._train
        scores = self._policy.scores(micro_batch, with_entropy=train.log_entropy)
        clipped = policy_loss(
            scores.logprobs,
            micro_batch.old_logprobs,
            micro_batch.advantages,
            micro_batch.weights,
            clip_eps_low=train.clip_eps_low,
            clip_eps_high=train.clip_eps_high,
        )
        loss, zero = clipped.loss, torch.zeros((), device=self._builder.device)
        entropy, kl = zero, zero
        if scores.entropy is not None:
            entropy = (micro_batch.weights * scores.entropy).sum()
        if reference_logprobs is not None:
            terms = kl_terms(scores.logprobs, reference_logprobs, train.kl_estimator)
            weighted = (micro_batch.weights * terms).sum()
            loss = loss + train.kl_coef * weighted
            kl = weighted.detach()
        parts = (
            micro_batch.weights.sum(),
            loss.detach(),
            clipped.clipped,
            clipped.ratio,
            clipped.behaviour_kl,
            entropy,
            kl,
        )
        return loss, torch.stack([part.double() for part in parts])

    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return self._reference.reference_logprobs(micro_batch)
