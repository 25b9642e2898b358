"""Adds up what losses log, over micro-batches and ranks. M: generated tokens of a micro-batch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import LossMetric, Reduction
from umbra.trainer.world import max_over_ranks, sum_over_ranks


class MetricTotals:
    """The metrics of one pass over a rank's micro-batches, of which there is at least one."""

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._weight: list[Tensor] = []  # scalars, as the others: one for each micro-batch
        self._values: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, LossMetric], weights: Tensor) -> None:
        """Adds those of one micro-batch.

        Args:
            weights: [M], of its tokens.

        Raises:
            UmbraError: these are not the metrics of the micro-batches before.
        """
        reductions: dict[str, Reduction] = {
            name: metric.reduction for name, metric in metrics.items()
        }
        if not self._weight:
            self._reductions = reductions
            self._values = {name: [] for name in reductions}
        elif reductions != self._reductions:
            raise UmbraError(
                f"a micro-batch's loss returned the metrics {sorted(reductions)}, the ones before "
                f"{sorted(self._reductions)}: return the same metrics for every micro-batch"
            )
        with torch.no_grad():
            self._weight.append(weights.sum())
            for name, metric in metrics.items():
                self._values[name].append(_reduced(metric, weights))

    def reduce(self) -> dict[str, float]:
        """The metrics over all ranks; 0 where no token has weight. Collective.

        Raises:
            UmbraError: the ranks do not have the same metrics; on every rank.
        """
        self._check_ranks_agree()
        names = sorted(self._reductions)
        added = [name for name in names if self._reductions[name] != "max"]
        largest = [name for name in names if self._reductions[name] == "max"]
        sums = [_stacked(self._weight).sum()]
        sums += [_stacked(self._values[name]).sum() for name in added]
        weight, *totals = _numbers(sum_over_ranks(torch.stack(sums)))
        found = dict(zip(added, totals, strict=True))
        for name in added:
            if self._reductions[name] == "mean":
                found[name] = found[name] / weight if weight else 0.0
        if largest:
            maxima = torch.stack([_stacked(self._values[name]).max() for name in largest])
            for name, value in zip(largest, _numbers(max_over_ranks(maxima)), strict=True):
                found[name] = 0.0 if value == -math.inf else value
        return {name: found[name] for name in self._reductions}

    def _check_ranks_agree(self) -> None:
        """Values are added by position, so a difference would mix them up, or never end."""
        code = zlib.crc32(repr(sorted(self._reductions.items())).encode())
        codes = torch.tensor([code, -code], device=self._weight[0].device)
        highest, negated_lowest = _numbers(max_over_ranks(codes))
        if highest != -negated_lowest:
            raise UmbraError(
                f"the loss returned the metrics {sorted(self._reductions)} on this rank and others "
                "on another one: return the same metrics on every rank"
            )


def _numbers(values: Tensor) -> list[float]:
    return [float(value) for value in values.cpu()]


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double()


def _reduced(metric: LossMetric, weights: Tensor) -> Tensor:
    """The metric of one micro-batch, a scalar; -inf for "max" where no token has weight."""
    match metric.reduction:
        case "mean":
            return (weights * metric.values).sum()
        case "sum":
            return metric.values.sum()
        case "max":
            return torch.where(weights > 0, metric.values, -math.inf).max()
        case _:
            assert_never(metric.reduction)
