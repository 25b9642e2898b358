"""When the job ends on a node: a stop, the end of its ranks, and the loss of other nodes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from umbra.runtime.actor.job_stop import STOP_WINDOW_S
from umbra.runtime.cluster.run_requests import PREEMPT_SIGNAL
from umbra.runtime.supervisor.job_end import AfterRanks, JobEnd, StopDecision

LATER_S = STOP_WINDOW_S + 0.1


def left(end: JobEnd, **what: bool) -> AfterRanks:
    """What happens when the last rank has left."""
    defaults = {"has_failed": False, "was_stopped": False, "have_all_detached": False}
    return end.after_last_rank(**(defaults | what))


@pytest.mark.parametrize("nodes_may_change", [False, True])
def test_the_job_is_over_when_all_ranks_said_that_they_leave(nodes_may_change: bool) -> None:
    end = JobEnd(nodes_may_change=nodes_may_change)

    assert left(end, have_all_detached=True) == AfterRanks.OVER
    assert left(end) != AfterRanks.OVER


@pytest.mark.parametrize(
    ("nodes_may_change", "may_restart", "then"),
    [
        (False, False, AfterRanks.OVER),
        (False, True, AfterRanks.KEEP),
        (True, False, AfterRanks.OVER),
        (True, True, AfterRanks.KEEP_ENGINES),
    ],
)
def test_after_a_failure_the_job_continues_if_torchrun_starts_ranks_again(
    nodes_may_change: bool, may_restart: bool, then: AfterRanks
) -> None:
    end = JobEnd(nodes_may_change=nodes_may_change)
    end.may_restart = may_restart

    assert left(end, has_failed=True, have_all_detached=True) == then


def test_ranks_that_torchrun_stops_for_another_node_come_back() -> None:
    stopped = {"was_stopped": True, "have_all_detached": True}

    assert left(JobEnd(nodes_may_change=True), **stopped) == AfterRanks.KEEP_ENGINES
    assert left(JobEnd(nodes_may_change=False), **stopped) == AfterRanks.OVER


@pytest.mark.parametrize("what", [{}, {"has_failed": True}, {"was_stopped": True}])
def test_after_a_stop_the_job_is_over_with_the_last_rank(what: dict[str, Any]) -> None:
    by_signal, by_request = JobEnd(nodes_may_change=True), JobEnd(nodes_may_change=True)
    for end in (by_signal, by_request):
        end.may_restart = True
    by_signal.stop(signal.SIGTERM, 0.0)
    by_request.is_for_good = True

    assert left(by_signal, **what) == left(by_request, **what) == AfterRanks.OVER
    assert by_request.ends_torchrun
    assert not by_signal.ends_torchrun


def test_a_stop_that_comes_as_several_signals_is_one_and_a_later_one_does_not_wait() -> None:
    end = JobEnd(nodes_may_change=False)

    assert end.stop(signal.SIGTERM, 10.0) == StopDecision.STOP_RANKS
    assert end.stop(signal.SIGTERM, 10.0 + STOP_WINDOW_S / 2) == StopDecision.STOP_RANKS
    assert end.stop(PREEMPT_SIGNAL, 10.0 + LATER_S) == StopDecision.IGNORE
    assert end.stop(signal.SIGTERM, 10.0 + LATER_S) == StopDecision.END  # counted from the first


def test_a_stop_ends_with_the_ranks_that_torchrun_starts_again() -> None:
    end = JobEnd(nodes_may_change=False)
    end.may_restart = True
    end.stop(signal.SIGTERM, 0.0)

    end.start_over()

    assert left(end, has_failed=True) == AfterRanks.KEEP
    assert end.stop(signal.SIGTERM, LATER_S) == StopDecision.STOP_RANKS


def test_the_launcher_starts_a_preempted_job_again() -> None:
    end = JobEnd(nodes_may_change=False)
    first = {"is_first_signal": True, "has_failed": False}
    failed = {"is_first_signal": False, "has_failed": True}

    assert end.is_preempted(PREEMPT_SIGNAL, **first)
    assert not end.is_preempted(signal.SIGTERM, **first)
    assert not end.is_preempted(PREEMPT_SIGNAL, is_first_signal=False, has_failed=False)
    assert not end.is_preempted(PREEMPT_SIGNAL, **failed)  # nothing would have continued
    end.may_restart = True
    assert end.is_preempted(PREEMPT_SIGNAL, **failed)


def test_keys_are_kept_for_the_nodes_that_are_left() -> None:
    def lose(end: JobEnd) -> None:
        end.lose_node()

    def stop(end: JobEnd) -> None:
        end.stop(signal.SIGTERM, 0.0)

    for happens in (lose, stop):
        end = JobEnd(nodes_may_change=True)
        assert end.may_forget_keys(has_failed=False)
        assert not end.may_forget_keys(has_failed=True)
        happens(end)
        assert not end.may_forget_keys(has_failed=False)
    end = JobEnd(nodes_may_change=True)
    end.lose_node()
    end.begin_epoch()
    assert end.may_forget_keys(has_failed=False)
