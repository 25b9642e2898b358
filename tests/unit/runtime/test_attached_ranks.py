"""The events that the ranks of a node receive."""

from __future__ import annotations

import signal

from umbra.runtime.cluster.attached_ranks import AttachedRank, AttachedRanks


def signals_sent(rank: AttachedRank) -> list[int]:
    """Takes what it has not read."""
    events = [rank.events.get_nowait() for _ in range(rank.events.qsize())]
    return [event["number"] for event in events if event["kind"] == "signal"]


def test_a_signal_of_one_rank_is_passed_on_to_all_once() -> None:
    ranks = AttachedRanks(on_event=lambda event: None)
    attached = [ranks.add(rank, pid=rank) for rank in range(2)]

    for sender in (1, 0):
        ranks.pass_on_signal(f"rank {sender}", 1, signal.SIGTERM)

    assert [signals_sent(rank) for rank in attached] == [[signal.SIGTERM]] * 2


def test_a_request_limits_what_a_signal_left_open_once() -> None:
    heard: list[float | None] = []
    ranks = AttachedRanks(on_event=lambda event: heard.append(event["grace_s"]))
    attached = ranks.add(0, pid=1)

    first = [
        ranks.pass_on_signal("rank 0", 1, signal.SIGINT),
        ranks.pass_on_signal("umbra stop", 1, signal.SIGTERM, 30.0),
        ranks.pass_on_signal("umbra stop (node 1)", 1, signal.SIGTERM, 30.0),  # comes back
        ranks.pass_on_signal("rank 0", 1, signal.SIGTERM),
    ]

    assert first == [True, False, False, False]
    assert heard == [None, 30.0]
    assert signals_sent(attached) == [signal.SIGINT, signal.SIGTERM]


def test_the_signal_that_ends_the_ranks_of_a_lost_job_is_not_passed_on() -> None:
    ranks = AttachedRanks(on_event=lambda event: None)
    attached = ranks.add(0, pid=1)
    ranks.fail("rank 1", "it was killed")

    ranks.pass_on_signal("rank 0", 1, signal.SIGTERM)

    assert signals_sent(attached) == []


def test_a_signal_to_ranks_before_a_restart_does_not_reach_those_after_it() -> None:
    ranks = AttachedRanks(on_event=lambda event: None)
    ranks.pass_on_signal("rank 1", 1, signal.SIGTERM)
    ranks.start_over(2)
    attached = ranks.add(0, pid=2)

    ranks.pass_on_signal("rank 1", 1, signal.SIGTERM)
    events_of_the_old = signals_sent(attached)
    ranks.pass_on_signal("rank 0", 2, signal.SIGINT)

    assert events_of_the_old == []
    assert signals_sent(attached) == [signal.SIGINT]
