"""One optimizer step (or a few) from one batch: forward, backward, clip, step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.policy_losses import (
    ImportanceLimits,
    PolicyLoss,
    decoupled_loss,
    kl_terms,
    policy_loss,
)
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.micro_batches import MicroBatch, MicroBatchBuilder, RankBatch
from umbra.trainer.model.optimizer import PolicyOptimizer
from umbra.trainer.model.policy import Policy
from umbra.trainer.world import max_over_ranks, sum_over_ranks

# What micro-batches and ranks add up, in this order.
_SUMS = (
    "weight",
    "loss",
    "clipped_share",
    "ratio_mean",
    "behaviour_kl",
    "entropy",
    "reference_kl",
    "importance_mean",
    "importance_limited_share",
)


@dataclass(slots=True)
class _Part:
    """A micro-batch, and its tokens under other policies; logprobs are [M], without gradient.

    Attributes:
        reference_logprobs: under the starting model; None without a KL term.
        proximal_logprobs: under the policy at the beginning of the step. The first update computes
            them anyway, for all of the batch before it changes a parameter: None until then.
    """

    micro_batch: MicroBatch
    reference_logprobs: Tensor | None
    proximal_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Totals:
    """What the micro-batches of a rank come to: `_SUMS`, [9] float64, and the largest weight."""

    sums: Tensor
    importance_max: Tensor


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
        self._limits = ImportanceLimits(
            cap=train.importance_cap,
            above_cap=train.importance_above_cap,
            floor=train.importance_floor,
        )

    def run(self, batch: RankBatch, step: int) -> dict[str, float]:
        """Trains on `batch` as step `step` (from 0); returns `train/...` and `time/...` metrics.

        Raises:
            UmbraError: the gradient is not finite, on every rank; parameters are as before.
        """
        started = time.perf_counter()
        parts = [
            _Part(micro_batch, self._reference_logprobs(micro_batch))
            for micro_batch in self._builder.build(batch)
        ]
        metrics: dict[str, float] = {}
        for update in range(self._train.updates_per_batch):
            totals = self._accumulate(parts)
            applied = self._optimizer.step(step)
            if not math.isfinite(applied["grad_norm"]):
                raise UmbraError(
                    f"step {step + 1}: the gradient is not finite (norm {applied['grad_norm']}); "
                    "the parameters are unchanged: lower train.learning_rate or "
                    "train.clip_eps_high, or compute in float32 (model.dtype)"
                )
            if update == 0:
                metrics = self._means(totals)
            metrics |= {f"train/{name}": value for name, value in applied.items()}
        metrics["time/train_s"] = time.perf_counter() - started
        return metrics

    def _means(self, totals: _Totals) -> dict[str, float]:
        """Token means by the loss's own weights; the loss itself is a sum. Collective."""
        weight, loss, *rest = (float(value) for value in sum_over_ranks(totals.sums))
        means = {
            name: value / weight if weight else 0.0
            for name, value in zip(_SUMS[2:], rest, strict=True)
        }
        if self._reference is None:
            del means["reference_kl"]
        if not self._train.log_entropy:
            del means["entropy"]
        if self._train.loss == "decoupled":
            means["importance_max"] = float(max_over_ranks(totals.importance_max))
        else:
            del means["importance_mean"], means["importance_limited_share"]
        return {f"train/{name}": value for name, value in ({"loss": loss} | means).items()}

    def _accumulate(self, parts: Sequence[_Part]) -> _Totals:
        """Gradients of the whole batch; this rank's part of what is logged."""
        device = self._builder.device
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        importance_max = torch.zeros((), dtype=torch.float64, device=device)
        for idx, part in enumerate(parts, 1):
            self._policy.expect_backward(is_last=idx == len(parts))
            loss, totals = self._loss(part)
            torch.autograd.backward(loss)
            sums += totals.sums
            importance_max = torch.maximum(importance_max, totals.importance_max)
        return _Totals(sums, importance_max)

    def _loss(self, part: _Part) -> tuple[Tensor, _Totals]:
        train, weights = self._train, part.micro_batch.weights
        scores = self._policy.scores(part.micro_batch, with_entropy=train.log_entropy)
        if part.proximal_logprobs is None:
            part.proximal_logprobs = scores.logprobs.detach()
        policy = self._policy_loss(scores.logprobs, part.proximal_logprobs, part.micro_batch)
        loss, zero = policy.loss, torch.zeros((), device=self._builder.device)
        entropy, kl = zero, zero
        if scores.entropy is not None:
            entropy = (weights * scores.entropy).sum()
        if part.reference_logprobs is not None:
            terms = kl_terms(scores.logprobs, part.reference_logprobs, train.kl_estimator)
            weighted = (weights * terms).sum()
            loss = loss + train.kl_coef * weighted
            kl = weighted.detach()
        sums = (
            weights.sum(),
            loss.detach(),
            policy.clipped,
            policy.ratio,
            policy.behaviour_kl,
            entropy,
            kl,
            policy.importance,
            policy.limited,
        )
        return loss, _Totals(
            torch.stack([value.double() for value in sums]), policy.importance_max.double()
        )

    def _policy_loss(
        self, logprobs: Tensor, proximal_logprobs: Tensor, micro_batch: MicroBatch
    ) -> PolicyLoss:
        train = self._train
        match train.loss:
            case "clipped":
                return policy_loss(
                    logprobs,
                    micro_batch.old_logprobs,
                    micro_batch.advantages,
                    micro_batch.weights,
                    clip_eps_low=train.clip_eps_low,
                    clip_eps_high=train.clip_eps_high,
                )
            case "decoupled":
                return decoupled_loss(
                    logprobs,
                    proximal_logprobs,
                    micro_batch.old_logprobs,
                    micro_batch.advantages,
                    micro_batch.weights,
                    clip_eps_low=train.clip_eps_low,
                    clip_eps_high=train.clip_eps_high,
                    limits=self._limits,
                )
            case _:
                assert_never(train.loss)

    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return self._reference.reference_logprobs(micro_batch)
