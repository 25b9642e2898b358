"""What a supervisor decides: at a stop, when ranks end or start again, when a node is lost."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_rules import STOP_WINDOW_S, AfterRanks, JobRules, StopDecision
from umbra.runtime.cluster.run_requests import PREEMPT_SIGNAL
from umbra.runtime.engine_api.engine_names import FOLLOWER_TARGET

LATER_S = STOP_WINDOW_S + 0.1


def left(rules: JobRules, **what: bool) -> AfterRanks:
    """What happens when the last rank has left."""
    defaults = {"has_failed": False, "was_stopped": False, "have_all_detached": False}
    return rules.after_last_rank(**(defaults | what))


@pytest.mark.parametrize("nodes_may_change", [False, True])
def test_the_job_is_over_when_all_ranks_said_that_they_leave(nodes_may_change: bool) -> None:
    rules = JobRules(nodes_may_change=nodes_may_change)

    assert left(rules, have_all_detached=True) == AfterRanks.OVER
    assert left(rules) != AfterRanks.OVER


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
    rules = JobRules(nodes_may_change=nodes_may_change)
    rules.may_restart = may_restart

    assert left(rules, has_failed=True, have_all_detached=True) == then


def test_ranks_that_torchrun_stops_for_another_node_come_back() -> None:
    stopped = {"was_stopped": True, "have_all_detached": True}

    assert left(JobRules(nodes_may_change=True), **stopped) == AfterRanks.KEEP_ENGINES
    assert left(JobRules(nodes_may_change=False), **stopped) == AfterRanks.OVER


@pytest.mark.parametrize("what", [{}, {"has_failed": True}, {"was_stopped": True}])
def test_after_a_stop_the_job_is_over_with_the_last_rank(what: dict[str, Any]) -> None:
    by_signal, by_request = JobRules(nodes_may_change=True), JobRules(nodes_may_change=True)
    for rules in (by_signal, by_request):
        rules.may_restart = True
    by_signal.stop(signal.SIGTERM, 0.0)
    by_request.is_for_good = True

    assert left(by_signal, **what) == left(by_request, **what) == AfterRanks.OVER
    assert by_request.ends_torchrun
    assert not by_signal.ends_torchrun


def test_a_stop_that_comes_as_several_signals_is_one_and_a_later_one_does_not_wait() -> None:
    rules = JobRules(nodes_may_change=False)

    assert rules.stop(signal.SIGTERM, 10.0) == StopDecision.STOP_RANKS
    assert rules.stop(signal.SIGTERM, 10.0 + STOP_WINDOW_S) == StopDecision.STOP_RANKS
    assert rules.stop(PREEMPT_SIGNAL, 10.0 + LATER_S) == StopDecision.IGNORE
    assert rules.stop(signal.SIGTERM, 10.0 + LATER_S) == StopDecision.END  # counted from the first


def test_a_stop_ends_with_the_ranks_that_torchrun_starts_again() -> None:
    rules = JobRules(nodes_may_change=False)
    rules.may_restart = True
    rules.stop(signal.SIGTERM, 0.0)

    rules.start_over()

    assert left(rules, has_failed=True) == AfterRanks.KEEP
    assert rules.stop(signal.SIGTERM, LATER_S) == StopDecision.STOP_RANKS


def test_the_launcher_starts_a_preempted_job_again() -> None:
    rules = JobRules(nodes_may_change=False)
    first = {"is_first_signal": True, "has_failed": False}
    failed = {"is_first_signal": False, "has_failed": True}

    assert rules.is_preempted(PREEMPT_SIGNAL, **first)
    assert not rules.is_preempted(signal.SIGTERM, **first)
    assert not rules.is_preempted(PREEMPT_SIGNAL, is_first_signal=False, has_failed=False)
    assert not rules.is_preempted(PREEMPT_SIGNAL, **failed)  # nothing would have continued
    rules.may_restart = True
    assert rules.is_preempted(PREEMPT_SIGNAL, **failed)


def test_keys_are_kept_for_the_nodes_that_are_left() -> None:
    def lose(rules: JobRules) -> None:
        rules.lose_node()

    def stop(rules: JobRules) -> None:
        rules.stop(signal.SIGTERM, 0.0)

    for happens in (lose, stop):
        rules = JobRules(nodes_may_change=True)
        assert rules.may_forget_keys(has_failed=False)
        assert not rules.may_forget_keys(has_failed=True)
        happens(rules)
        assert not rules.may_forget_keys(has_failed=False)
    rules = JobRules(nodes_may_change=True)
    rules.lose_node()
    rules.begin_epoch()
    assert rules.may_forget_keys(has_failed=False)


BOTH = (False, True)


@pytest.mark.parametrize(
    ("elastic", "may_restart", "is_for_good", "was_asked", "has_failed", "was_stopped", "detached"),
    list(itertools.product(BOTH, repeat=7)),
)
def test_what_happens_after_the_last_rank(
    elastic: bool,
    may_restart: bool,
    is_for_good: bool,
    was_asked: bool,
    has_failed: bool,
    was_stopped: bool,
    detached: bool,
) -> None:
    rules = JobRules(nodes_may_change=elastic)
    rules.may_restart, rules.is_for_good = may_restart, is_for_good
    if was_asked:
        rules.stop(signal.SIGTERM, 0.0)

    then = left(rules, has_failed=has_failed, was_stopped=was_stopped, have_all_detached=detached)

    leaves = detached and not (elastic and was_stopped)
    ends = not may_restart if has_failed else leaves
    kept = AfterRanks.KEEP_ENGINES if elastic else AfterRanks.KEEP
    assert then == (AfterRanks.OVER if is_for_good or was_asked or ends else kept)


@pytest.mark.parametrize(
    ("elastic", "has_met", "has_ranks"), list(itertools.product(BOTH, repeat=3))
)
def test_a_request_waits_for_nodes_that_meet_again(
    elastic: bool, has_met: bool, has_ranks: bool
) -> None:
    rules = JobRules(nodes_may_change=elastic)

    waits = rules.request_must_wait(has_met=has_met, has_ranks=has_ranks)

    assert waits == (elastic and not (has_met and has_ranks))
    assert rules.has_epochs == rules.lose_node() == elastic


@dataclass
class Actor:
    spec: ActorSpec
    is_running: bool


@pytest.mark.parametrize(
    ("elastic", "is_engine", "is_follower", "has_followers", "loads_weights", "is_running"),
    list(itertools.product(BOTH, repeat=6)),
)
def test_which_actors_outlive_ranks_and_pools(
    elastic: bool,
    is_engine: bool,
    is_follower: bool,
    has_followers: bool,
    loads_weights: bool,
    is_running: bool,
) -> None:
    rules = JobRules(nodes_may_change=elastic)
    spec = ActorSpec(
        name="actor",
        role="engine" if is_engine else "actor",
        target=FOLLOWER_TARGET if is_follower else "module:Engine",
        kwargs={"followers": ["one"] if has_followers else [], "load_weights": loads_weights},
    )
    actor = Actor(spec, is_running)

    is_reusable = is_engine and is_running and not (is_follower or has_followers or loads_weights)
    assert rules.outlives_ranks(actor) == (is_reusable if elastic else is_engine)
    assert rules.outlives_pools(actor) == (elastic and is_reusable)
