"""Small parts of a step: metrics over micro-batches, the learning rate, peaks of memory."""

from __future__ import annotations

import math

import pytest
import torch

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.base import LossMetric
from umbra.trainer.model.optimizer import Schedule, learning_rate_factor
from umbra.trainer.reporting.memory_metrics import MemoryAccount
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


def factors(
    schedule: Schedule, total_steps: int = 10, warmup_steps: int = 0, min_ratio: float = 0.0
) -> list[float]:
    return [
        learning_rate_factor(
            step,
            schedule=schedule,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_ratio=min_ratio,
        )
        for step in range(total_steps)
    ]


def test_constant_stays() -> None:
    assert factors("constant") == [1.0] * 10


def test_warmup_rises_to_the_full_rate_and_no_further() -> None:
    assert factors("constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_evenly_to_the_minimum_after_the_last_step() -> None:
    values = factors("linear", total_steps=5, warmup_steps=1, min_ratio=0.2)

    assert values[0] == 1.0
    assert values[1:] == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = factors("cosine")

    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.5)
    assert values[2] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.2)))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_last_step_teaches(schedule: Schedule) -> None:
    assert all(factors(schedule, total_steps=2, warmup_steps=1))
    assert all(factors(schedule, total_steps=2))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_runs_of_one_step_and_warmups_longer_than_the_run_work(schedule: Schedule) -> None:
    assert factors(schedule, total_steps=1) == [1.0]
    assert factors(schedule, total_steps=2, warmup_steps=5) == pytest.approx([0.2, 0.4])


MIB_256 = 1 << 28


def account_of(device: torch.device) -> dict[str, float]:
    """The metrics of a phase that takes 256 MiB for a while, and of one that takes nothing."""
    account = MemoryAccount(device)
    with account.phase("train"):
        torch.ones(MIB_256, dtype=torch.uint8, device=device)
    with account.phase("sync"):
        pass
    row = account.take()
    assert account.take() == {}
    return row


def check(row: dict[str, float], *whats: str) -> None:
    assert set(row) == {
        f"memory/{phase}_{what}_gib" for phase in ("train", "sync") for what in whats
    }
    growth = {
        phase: row[f"memory/{phase}_peak_gib"] - row[f"memory/{phase}_allocated_gib"]
        for phase in ("train", "sync")
    }
    assert growth["train"] == pytest.approx(0.25, abs=0.02)
    assert growth["sync"] == pytest.approx(0.0, abs=0.02)


def test_a_peak_belongs_to_its_phase() -> None:
    check(account_of(torch.device("cpu")), "allocated", "peak")


def test_a_phase_that_fails_is_over() -> None:
    account = MemoryAccount(torch.device("cpu"))

    with pytest.raises(RuntimeError), account.phase("train"):
        raise RuntimeError

    assert len(account.take()) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_peak_belongs_to_its_phase_on_a_gpu() -> None:
    row = account_of(torch.device("cuda"))

    check(row, "allocated", "peak", "reserved")
    assert row["memory/train_reserved_gib"] >= row["memory/train_peak_gib"]
