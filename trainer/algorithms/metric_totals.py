"""Adds up the metrics of losses over micro-batches and ranks. M: tokens of a micro-batch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import LossMetric, Reduction
from umbra.trainer.world.world import max_over_ranks, sum_over_ranks


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
