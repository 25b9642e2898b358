"""The learning-rate schedule."""

from __future__ import annotations

import math

import pytest

from umbra.trainer.model.optimizer import Schedule, learning_rate_factor


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


def test_linear_falls_evenly_to_the_minimum_at_the_last_step() -> None:
    values = factors("linear", total_steps=6, warmup_steps=1, min_ratio=0.2)

    assert values[0] == 1.0
    assert values[1:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = factors("cosine", total_steps=11)

    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.5)
    assert values[10] == pytest.approx(0.0, abs=1e-12)
    assert values[2] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.2)))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_runs_of_one_step_and_warmups_longer_than_the_run_work(schedule: Schedule) -> None:
    assert factors(schedule, total_steps=1) == [1.0]
    assert factors(schedule, total_steps=2, warmup_steps=5) == pytest.approx([0.2, 0.4])
