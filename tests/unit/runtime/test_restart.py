"""Restart policies, with the clock as an argument."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.actor.actor_spec import (
    DeclareFailed,
    RestartPolicy,
    RestartTracker,
    ScheduleRestart,
)
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.process_end import ExitStatus

CRASH = ExitStatus(-signal.SIGKILL)
CLEAN = ExitStatus(0)
POLICY = RestartPolicy(max_restarts=3, window_s=100.0, backoff_initial_s=1.0, backoff_max_s=3.0)


def test_never_declares_failure_at_the_first_end() -> None:
    tracker = RestartTracker(replace(POLICY, mode="never"))

    assert tracker.observe(CRASH, 0.0) == DeclareFailed("killed by SIGKILL (9)")
    assert tracker.observe(CLEAN, 0.0) == DeclareFailed("exited with status 0")


@pytest.mark.parametrize("code", [0, 1, -signal.SIGTERM, 128 + signal.SIGTERM, None])
def test_every_end_is_a_failure_whatever_its_status(code: int | None) -> None:
    tracker = RestartTracker(POLICY)

    assert tracker.observe(ExitStatus(code), 0.0) == ScheduleRestart(1.0)


def test_backoff_doubles_up_to_its_maximum_then_the_tracker_gives_up() -> None:
    tracker = RestartTracker(POLICY)

    decisions = [tracker.observe(CRASH, float(now)) for now in range(4)]

    assert decisions[:3] == [ScheduleRestart(1.0), ScheduleRestart(2.0), ScheduleRestart(3.0)]
    assert decisions[3] == DeclareFailed(
        "killed by SIGKILL (9), after 3 restarts within 100 s (allowed: 3)"
    )
    assert tracker.num_restarts == 3


def test_old_restarts_leave_the_window_and_backoff_starts_again() -> None:
    tracker = RestartTracker(POLICY)
    for now in (0.0, 1.0, 2.0):
        tracker.observe(CRASH, now)

    assert isinstance(tracker.observe(CRASH, 99.9), DeclareFailed)
    assert tracker.observe(CRASH, 100.0) == ScheduleRestart(3.0)
    assert tracker.observe(CRASH, 1000.0) == ScheduleRestart(1.0)
    assert tracker.num_restarts == 5


def test_no_restarts_allowed_means_none() -> None:
    tracker = RestartTracker(replace(POLICY, max_restarts=0))

    assert isinstance(tracker.observe(CRASH, 0.0), DeclareFailed)


def test_a_long_crash_loop_does_not_overflow() -> None:
    tracker = RestartTracker(replace(POLICY, max_restarts=5000))

    delays = {tracker.observe(CRASH, 0.0) for _ in range(5000)}

    assert delays == {ScheduleRestart(1.0), ScheduleRestart(2.0), ScheduleRestart(3.0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "sometimes"}, "use never or on_failure"),
        ({"max_restarts": -1}, "0 or more"),
        ({"window_s": 0.0}, "more than 0"),
        ({"backoff_initial_s": 5.0}, "5 s to 3 s"),
        ({"backoff_initial_s": -1.0}, "0 <= backoff_initial_s"),
    ],
)
def test_a_wrong_policy_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(POLICY, **change)


@given(
    gaps=st.lists(st.floats(0.0, 60.0), max_size=60),
    max_restarts=st.integers(0, 6),
    window_s=st.floats(0.5, 120.0),
)
def test_no_window_ever_holds_more_restarts_than_allowed(
    gaps: list[float], max_restarts: int, window_s: float
) -> None:
    tracker = RestartTracker(replace(POLICY, max_restarts=max_restarts, window_s=window_s))
    now, granted = 0.0, list[float]()

    for gap in gaps:
        now += gap
        recent = [at for at in granted if now - at < window_s]
        decision = tracker.observe(CRASH, now)
        if len(recent) < max_restarts:
            assert decision == ScheduleRestart(min(1.0 * 2 ** len(recent), 3.0))
            granted.append(now)
        else:
            assert isinstance(decision, DeclareFailed)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (130, "stopped by SIGINT (exit status 130)"),
        (143, "stopped by SIGTERM (exit status 143)"),
        (-15, "killed by SIGTERM (15)"),
        (-9, "killed by SIGKILL (9)"),
        (-11, "killed by SIGSEGV (11)"),
        (-40, "killed by signal 40 (40)"),
        (None, "ended with unknown status"),
    ],
)
def test_an_exit_status_describes_how_a_process_ended(code: int | None, text: str) -> None:
    assert str(ExitStatus(code)) == text
