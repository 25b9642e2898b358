"""Metrics of losses, added up over micro-batches. Over ranks: test_distributed_training.py."""

from __future__ import annotations

import pytest
import torch

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import LossMetric
from umbra.trainer.step import MetricTotals


def test_each_metric_is_reduced_as_it_asks() -> None:
    totals = MetricTotals()

    for values, weights in (([1.0, 5.0], [0.5, 0.25]), ([-3.0, 99.0], [0.25, 0.0])):
        tokens = torch.tensor(values, requires_grad=True)
        metrics = {
            "mean": LossMetric(tokens),
            "share": LossMetric(tokens > 0),
            "max": LossMetric(tokens, "max"),
            "sum": LossMetric(tokens.detach()[:1], "sum"),
        }
        totals.add(metrics, torch.tensor(weights))

    assert totals.reduce() == {"mean": 1.0, "share": 0.75, "max": 5.0, "sum": -2.0}


def test_the_largest_value_may_be_negative() -> None:
    totals = MetricTotals()

    totals.add({"max": LossMetric(torch.tensor([-2.0, 0.0]), "max")}, torch.tensor([1.0, 0.0]))

    assert totals.reduce() == {"max": -2.0}


def test_without_any_weight_there_are_only_sums() -> None:
    totals = MetricTotals()
    values = torch.ones(1)

    for _ in range(2):
        metrics = {
            "mean": LossMetric(values),
            "max": LossMetric(values, "max"),
            "sum": LossMetric(values * 0.0, "sum"),
        }
        totals.add(metrics, torch.zeros(1))

    assert totals.reduce() == {"sum": 0.0}


def test_other_metrics_in_a_later_micro_batch_are_refused() -> None:
    totals = MetricTotals()
    weights = torch.ones(1)
    totals.add({"ratio": LossMetric(weights)}, weights)

    with pytest.raises(
        UmbraError, match=r"metrics \['extra', 'ratio'\], and earlier ones \['ratio"
    ):
        totals.add({"ratio": LossMetric(weights), "extra": LossMetric(weights)}, weights)
