from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import assert_never

import torch
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.user_function import load_function
from umbra.runtime.tracing.spans import span
from umbra.trainer.algorithms.base import LossMetric, Reduction
from umbra.trainer.config.algorithm_names import TOKEN_ADVANTAGES
from umbra.trainer.config.trainer_config import CriticSection, TrainSection
from umbra.trainer.critic import ValueObjective
from umbra.trainer.data.train_batch import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    VALUES,
    TrainBatch,
)
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.model.micro_batches import MicroBatch, MicroBatchBuilder
from umbra.trainer.model.train_model import CRITIC, POLICY, REFERENCE, TrainModel
from umbra.trainer.nonfinite_origin import nonfinite_origin
from umbra.trainer.objective import Objective
from umbra.trainer.world.mesh import max_over_ranks, sum_over_ranks


@dataclass(eq=False, slots=True)
class Learner:
    """A model in training and what it is trained for."""

    name: str
    model: TrainModel
    objective: Objective
    first_step: int = 0  # in which it learns
    num_skipped: int = 0  # optimizer steps, in a row

    @property
    def prefix(self) -> str:
        """Begins the names of its metrics."""
        return "train/" if self.name == POLICY else f"{self.name}/"

    def accumulate(self, micro_batches: Sequence[MicroBatch], totals: MetricTotals) -> None:
        for idx, micro_batch in enumerate(micro_batches, 1):
            self._backward(micro_batch, totals, is_last=idx == len(micro_batches))

    def _backward(self, micro_batch: MicroBatch, totals: MetricTotals, *, is_last: bool) -> None:
        """Frees the graph when it returns: the next micro-batch needs the memory."""
        scores = self.model.score(micro_batch, self.objective.entropy_use)
        if self.name == POLICY:
            micro_batch.columns.setdefault(PROXIMAL_LOGPROBS, scores.logprobs.detach())
        output = self.objective(scores, micro_batch)
        self.model.backward(output.loss, is_last=is_last)
        totals.add(output.metrics, micro_batch.weights)


class TrainStep:
    """Does the optimizer steps of one batch, one for each mini-batch and update: forward, backward,
    clip, step. Every rank has one; `run` is collective. Unless `kl_coef` is 0, `models` has the
    frozen starting model as the reference, or the policy has adapters and is one without them. With
    `critic`, it has a critic, whose values become advantages; a mini-batch trains it after the
    policy. `warn` shows a warning to the operator; `check` is None where batches are not an
    engine's."""

    def __init__(
        self,
        models: Mapping[str, TrainModel],
        builder: MicroBatchBuilder,
        train: TrainSection,
        objective: Objective,
        warn: Callable[[str], None],
        check: LogprobCheck | None = None,
        critic: CriticSection | None = None,
    ) -> None:
        self._policy = models[POLICY]
        self._reference = models.get(REFERENCE)
        self._builder = builder
        self._train = train
        self._critic = critic
        warmup_steps = critic.warmup_steps if critic is not None else 0
        self._learners = [Learner(POLICY, self._policy, objective, first_step=warmup_steps)]
        if critic is not None:
            value_objective = ValueObjective(critic.value_clip)
            self._learners.append(Learner(CRITIC, models[CRITIC], value_objective))
        self._warn = warn
        self._check = check

    def run(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Trains on `batch` as step `step` (from 0); returns `train/...`, `critic/...` and
        `time/...` metrics. Raises UmbraError on every rank, with parameters unchanged, if the
        gradient is not finite and may not be skipped, or engines and trainer compute different
        models."""
        with span("train") as train:
            metrics = self._update(batch, step)
        return metrics | {"time/train_s": train.seconds}

    def _update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        every = self._train.reference_every
        if self._reference is not None and every and step and step % every == 0:
            self._reference.copy_from(self._policy)
        learners = [each for each in self._learners if step >= each.first_step]
        mini_batches = self._builder.build(batch)
        metrics_of_scores = self._score(mini_batches, step)
        metrics: dict[str, float] = {}
        norms: dict[str, list[float]] = {learner.prefix: [] for learner in learners}
        for update in range(self._train.updates_per_batch):
            totals = [MetricTotals() for _ in learners]
            for idx, mini_batch in enumerate(mini_batches):
                for learner, its_totals in zip(learners, totals, strict=True):
                    with span("forward and backward", micro_batches=len(mini_batch)):
                        learner.accumulate(mini_batch, its_totals)
                    if update == idx == 0 and learner is learners[0] and self._check is not None:
                        metrics |= self._check.run(batch, [*chain(*mini_batches)], step)
                    applied = self._step(learner, batch, mini_batch, step)
                    metrics |= applied
                    norms[learner.prefix].append(applied[f"{learner.prefix}grad_norm"])
            if update == 0:
                for learner, its_totals in zip(learners, totals, strict=True):
                    found = its_totals.reduce()
                    metrics |= {f"{learner.prefix}{name}": each for name, each in found.items()}
                    metrics[f"{learner.prefix}loss"] /= len(mini_batches)
        for prefix, of_steps in norms.items():
            finite = [norm for norm in of_steps if math.isfinite(norm)]
            metrics[f"{prefix}grad_norm"] = max(finite, default=math.nan)
            if self._train.skip_nonfinite:
                metrics[f"{prefix}skipped_steps"] = float(len(of_steps) - len(finite))
        metrics |= metrics_of_scores()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def warm_up(self, batch: TrainBatch, step: int) -> None:
        """Computes what step `step` does before it changes a parameter, with the mini-batch of
        `batch` in the place of its first ones, and drops the gradients. Collective."""
        mini_batches = self._builder.build(batch) * min(2, self._train.mini_batches)
        metrics_of_scores = self._score(mini_batches, step)
        for learner in self._learners:
            learner.accumulate(mini_batches[0], MetricTotals())
            learner.model.clear_gradients()
        metrics_of_scores()

    def _score(
        self, mini_batches: Sequence[Sequence[MicroBatch]], step: int
    ) -> Callable[[], dict[str, float]]:
        """Adds the scores of other models, before a parameter changes, and the advantages of
        tokens; what it returns waits for these, and returns their metrics. With a single
        mini-batch, the first update of the policy computes the proximal logprobs itself."""
        train, micro_batches = self._train, list(chain(*mini_batches))
        needs_proximal = train.advantage in TOKEN_ADVANTAGES and train.kl_in_reward
        needs_proximal |= any(step < learner.first_step for learner in self._learners)
        is_proximal = needs_proximal or len(mini_batches) > 1
        for micro_batch in micro_batches:
            if train.kl_coef:
                policy, reference = self._policy, self._reference
                measure = reference.measure if reference else policy.measure_start
                micro_batch.columns[REFERENCE_LOGPROBS] = measure(micro_batch).logprobs
            if is_proximal:
                proximal = self._policy.measure(micro_batch)
                micro_batch.columns[PROXIMAL_LOGPROBS] = proximal.logprobs
            if self._critic is not None:
                values = self._learners[-1].model.measure(micro_batch)
                micro_batch.columns[VALUES] = values.logprobs
        target = TOKEN_ADVANTAGES.get(train.advantage)
        if target is None:
            return dict[str, float]
        add = load_function(target, "train.advantage")
        return add(micro_batches, self._critic, train)

    def _step(
        self, learner: Learner, batch: TrainBatch, mini_batch: Sequence[MicroBatch], step: int
    ) -> dict[str, float]:
        with span("optimizer"):
            applied = learner.model.step(step - learner.first_step)
        if math.isfinite(norm := applied["grad_norm"]):
            learner.num_skipped = 0
        else:
            of, scored = ("", "logprobs") if learner.name == POLICY else ("critic's ", "values")
            origin = nonfinite_origin(learner.model, batch, mini_batch, learner.objective, scored)
            found = f"step {step + 1}: the {of}gradient is not finite (norm {norm}): {origin}"
            self._skip(learner, found)
        return {f"{learner.prefix}{name}": value for name, value in applied.items()}

    def _skip(self, learner: Learner, found: str) -> None:
        """Drops the gradient with a warning, or raises if it may not be skipped."""
        allowed = self._train.skip_nonfinite
        if learner.num_skipped == allowed:
            before = f"{allowed} before it were skipped (train.skip_nonfinite). " if allowed else ""
            raise UmbraError(
                f"{found}. {before}It has changed no parameter: lower "
                f"{learner.prefix[:-1]}.learning_rate (in RL also train.clip_eps_high), or compute "
                "in float32 (model.dtype)"
            )
        learner.model.clear_gradients()
        learner.num_skipped += 1
        self._warn(
            f"warning: {found}. It is skipped, as number {learner.num_skipped} in a row; "
            f"train.skip_nonfinite allows {allowed}"
        )


class MetricTotals:
    """The metrics of one pass over a rank's micro-batches; there must be at least one."""

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._weight: list[Tensor] = []  # scalars, one per micro-batch, as in `_values`
        self._values: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, LossMetric], weights: Tensor) -> None:
        """Adds one micro-batch, whose tokens have `weights`, [M]. Raises UmbraError if its metrics
        have other names than those of earlier micro-batches."""
        reductions: dict[str, Reduction] = {
            name: metric.reduction for name, metric in metrics.items()
        }
        if not self._weight:
            self._reductions = reductions
            self._values = {name: [] for name in reductions}
        elif reductions != self._reductions:
            raise UmbraError(
                f"a micro-batch's loss returned the metrics {sorted(reductions)}, and earlier ones "
                f"{sorted(self._reductions)}: return the same metrics for every micro-batch"
            )
        with torch.no_grad():
            self._weight.append(weights.sum())
            for name, metric in metrics.items():
                self._values[name].append(_reduced(metric, weights))

    def reduce(self) -> dict[str, float]:
        """The metrics over all ranks; sums alone if no token has weight. Collective. Raises
        UmbraError on every rank if the ranks do not have the same metrics."""
        self._check_ranks_agree()
        names = sorted(self._reductions)
        added = [name for name in names if self._reductions[name] != "max"]
        largest = [name for name in names if self._reductions[name] == "max"]
        sums = [_stacked(self._weight).sum()]
        sums += [_stacked(self._values[name]).sum() for name in added]
        weight, *totals = _numbers(sum_over_ranks(torch.stack(sums)))
        found = dict(zip(added, totals, strict=True))
        if largest:
            maxima = torch.stack([_stacked(self._values[name]).max() for name in largest])
            found |= zip(largest, _numbers(max_over_ranks(maxima)), strict=True)
        if not weight:
            return {name: found[name] for name in added if self._reductions[name] == "sum"}
        return {
            name: found[name] / (weight if reduction == "mean" else 1.0)
            for name, reduction in self._reductions.items()
        }

    def _check_ranks_agree(self) -> None:
        """Names must agree: values are added by position, and other names would hang."""
        code = zlib.crc32(repr(sorted(self._reductions.items())).encode())
        codes = torch.tensor([code, -code], device=self._weight[0].device)
        highest, negated_lowest = _numbers(max_over_ranks(codes))
        if highest != -negated_lowest:
            raise UmbraError(
                f"the loss returned the metrics {sorted(self._reductions)} on this rank and "
                "different ones on another rank: return the same metrics on every rank"
            )


def _numbers(values: Tensor) -> list[float]:
    return [float(value) for value in values.cpu()]


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double()


def _reduced(metric: LossMetric, weights: Tensor) -> Tensor:
    """A scalar; -inf for "max" if no token has weight."""
    match metric.reduction:
        case "mean":
            return (weights * metric.values).sum()
        case "sum":
            return metric.values.sum()
        case "max":
            return torch.where(weights > 0, metric.values, -math.inf).max()
        case _:
            assert_never(metric.reduction)
