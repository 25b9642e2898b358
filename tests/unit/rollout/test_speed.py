from __future__ import annotations

import pytest

from umbra.runtime.rollout.dispatch.router import EngineSpeed


def measured(tokens_per_s: float, num_requests: int, seconds: float = 30.0) -> EngineSpeed:
    """The measured speed of an engine that was this fast, from batches of half a second."""
    speed = EngineSpeed()
    feed(speed, tokens_per_s, num_requests, 0.0, seconds)
    return speed


def feed(
    speed: EngineSpeed, tokens_per_s: float, num_requests: int, start_s: float, stop_s: float
) -> None:
    for tick in range(int(start_s * 2), int(stop_s * 2) + 1):
        speed.observe(int(tokens_per_s / 2), num_requests, tick / 2)


def test_an_engine_that_makes_a_third_of_the_tokens_has_a_third_of_the_speed() -> None:
    assert measured(300, 8).value == pytest.approx(measured(100, 8).value * 3)


def test_a_batch_or_two_are_no_measurement() -> None:
    speed = EngineSpeed()
    assert speed.value == 0

    speed.observe(50, 1, 10.0)
    speed.observe(50, 1, 10.3)
    assert speed.value == 0

    speed.observe(50, 1, 10.6)
    assert speed.value == pytest.approx(100 / 0.6)


@pytest.mark.parametrize("growth", [1.0, 0.5, 0.0])
def test_the_engine_with_less_to_do_seems_no_slower_than_it_has_less_to_do(growth: float) -> None:
    """Tokens a second grow with the requests, or with their square root, or not at all."""
    few, many = measured(20 * 4**growth, 4), measured(20 * 64**growth, 64)

    assert 4 / few.value < 64 / many.value


def test_idle_time_does_not_count() -> None:
    speed = measured(100, 4)
    before = speed.value

    speed.pause()
    feed(speed, 100, 4, 1000, 1010)
    assert speed.value == pytest.approx(before)

    speed.observe(0, 0, 2000.0)  # nothing is in flight: a pause as well
    feed(speed, 100, 4, 3000, 3010)
    assert speed.value == pytest.approx(before)


def test_an_engine_that_is_throttled_is_noticed_within_a_few_times_ten_seconds() -> None:
    speed = measured(300, 8)

    feed(speed, 100, 8, 30.5, 60)

    assert speed.value == pytest.approx(measured(100, 8).value, rel=0.15)
