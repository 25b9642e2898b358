"""The state that survives the rollout manager, rollbacks, and the processes of agent loops."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from ledger_replay import replay
from live_rollouts import LiveRollouts, killing, ledger_of, merged, while_generating
from session_rank import SessionRank
from test_live_rollouts import expected_completions, pause_again_and_again

from umbra.runtime.errors import DeadlineExceeded, LedgerError
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.sample_accounts import SampleState
from umbra.runtime.session.rollouts import Rollouts
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

pytestmark = [pytest.mark.process, pytest.mark.slow]


def completions(samples: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    return {name: sample["completion"] for name, sample in samples.items()}


def tokens_made(live: LiveRollouts) -> int:
    """By all engines since their start."""
    return sum(
        live.session.actor(name).call("stats")["tokens_total"]
        for name in live.processes()
        if name.startswith("policy-")
    )


def killing_manager(
    live: LiveRollouts, *, after_tokens_on_disk: int
) -> AbstractContextManager[None]:
    """SIGKILLs it once the ledger on disk has so many tokens of the block's batch. Its successor
    has only the rest to generate, which the engines may have generated before, too."""

    def kill() -> None:
        deadline, found = time.monotonic() + 60.0, 0
        while found < after_tokens_on_disk:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
            found = replay(read_history(live.ledger_path).entries).totals.generated_tokens
        live.signal("rollouts", signal.SIGKILL)

    return while_generating(live, 0, kill)


def test_a_killed_manager_resumes_where_it_was(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(umbra_session, tmp_path, engine={"tokens_per_s": 60.0})
    live.publish(1)

    with killing_manager(live, after_tokens_on_disk=600):
        samples = merged(live.next_batch(0))

    assert completions(samples) == expected_completions(0)
    assert all(set(sample["versions"]) == {1} for sample in samples.values())
    assert live.processes()["rollouts"]["incarnation"] == 2
    assert tokens_made(live) <= 16 * 64 + (16 * 64 - 600)
    state = ledger_of(live)
    assert state.counts[SampleState.LEASED] == 16
    assert state.totals.generated_tokens == 16 * 64


def test_a_killed_manager_resumes_before_the_ranks_ask(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, config={"max_staleness": 1})
    live.publish(0)
    live.next_batch(0)

    live.replace_manager()

    live.wait_for_tokens(16 * 64)  # of the next batch, while the ranks train


def test_the_ranks_get_an_error_that_recovery_failed_with(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.publish(0)
    live.next_batch(0)
    prompts = tmp_path / "prompts.msgpack"
    prompts.write_bytes(prompts.read_bytes().replace(b"p1", b"x1"))

    live.replace_manager()
    for _ in range(2):
        failures = live.call_as_ranks(lambda rank: failure_of_next_batch(live, rank, 1))
        assert all("the data set, train.seed" in text for text in failures), failures

    assert live.processes()["rollouts"]["incarnation"] == 2


def failure_of_next_batch(live: LiveRollouts, rank: int, step: int) -> str:
    with pytest.raises(LedgerError) as caught:
        live.manager.call("next_batch", rank, step, 0, timeout_s=60.0)
    return str(caught.value)


def test_a_rank_that_lost_its_answer_gets_it_alone(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.publish(0)
    batches = live.next_batch(0)

    def lost(rank: int, method: str, *arguments: int) -> dict[str, Any]:
        answer: dict[str, Any] = live.manager.call(method, rank, *arguments, timeout_s=60.0)
        return answer

    for rank in (1, 0):
        again = lost(rank, "next_batch", 0, 0)
        assert again["sample_ids"] == batches[rank]["sample_ids"]
        assert again["tokens"].tolist() == batches[rank]["tokens"].tolist()
        live.signal("rollouts", signal.SIGKILL)  # the ledger has its state
    evaluation = live.evaluate(0)
    assert lost(1, "evaluate", 0) == evaluation[1]


def test_an_evaluation_beside_batches_that_a_killed_manager_had_begun_is_made_when_ranks_ask(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, engine={"tokens_per_s": 60.0})
    rollouts = Rollouts(umbra_session, "rollouts")
    live.announce(0, 0)
    live.publish(0)
    rollouts.begin_evaluation(0, 0.0)
    assert not rollouts.is_evaluated()

    live.replace_manager()

    assert rollouts.is_evaluated()
    one, other = live.evaluate(0)
    assert one == other
    assert one["tokens"] == 8 * 64


def test_an_evaluation_that_some_ranks_lack_is_given_to_them_by_the_next_manager(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.announce(0, 0)
    live.publish(0)
    evaluation = live.evaluate(0)

    live.replace_manager()
    with ThreadPoolExecutor(1) as side:  # rank 0 has its answer
        ahead = side.submit(live.manager.call, "next_batch", 0, 0, 0, timeout_s=60.0)
        live.wait_for_call("next_batch for step 1")
        again = live.manager.call("evaluate", 1, 0, timeout_s=60.0)
        batch = [live.manager.call("next_batch", 1, 0, 0, timeout_s=60.0), ahead.result(60.0)]

    assert again == evaluation[1]
    assert completions(merged(batch)) == expected_completions(0)


def test_ranks_that_the_call_for_weights_did_not_reach_are_sent_after_the_others(
    umbra_session: Session, tmp_path: Path
) -> None:
    """It reached rank 1; the manager dies before rank 0 hears of it."""
    live = LiveRollouts(umbra_session, tmp_path, num_engines=1, engine={"tokens_per_s": 60.0})
    live.announce(0, 0)
    live.publish(0)

    def ask(rank: int) -> dict[str, Any]:
        answer: dict[str, Any] = live.manager.call("next_batch", rank, 0, 0, timeout_s=60.0)
        return answer

    def publish_late() -> None:
        time.sleep(1.5)
        publish_as(live, 1, 0)

    with killing(live, "policy-0", after_tokens=100):
        answers = live.call_as_ranks(ask)
    assert answers == [{"kind": "sync_wanted", "version": 0}] * 2
    live.replace_manager()
    with ThreadPoolExecutor(1) as side:
        ahead = side.submit(publish_late)
        assert ask(0) == {"kind": "sync_wanted", "version": 0}
        publish_as(live, 0, 0)
        ahead.result(60.0)

    assert completions(merged(live.call_as_ranks(ask))) == expected_completions(0)


def publish_as(live: LiveRollouts, rank: int, version: int) -> None:
    """One rank of two publishes."""
    publisher = WeightPublisher(SessionRank(live.session, rank, 2), {"w": torch.zeros(10)})
    publisher.publish("policy", version, 20.0)


@pytest.mark.parametrize(("version", "ranks"), [(0, [0]), (1, [])])
def test_nobody_is_sent_after_ranks_that_publish_another_version(
    umbra_session: Session, tmp_path: Path, version: int, ranks: list[int]
) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.publish(0)

    with ThreadPoolExecutor(1) as side:
        ahead = side.submit(publish_as, live, 0, version)
        with pytest.raises(DeadlineExceeded, match="a weight sync is in progress"):
            pause_again_and_again(umbra_session)
        assert umbra_session.supervisor_call("catch_up", "policy")["ranks"] == ranks
        publish_as(live, 1, version)
        ahead.result(60.0)

    assert umbra_session.supervisor_call("catch_up", "policy")["ranks"] == []


def test_a_rank_that_is_merely_late_is_waited_for(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.announce(0, 0)
    live.publish(0)

    def ask(rank: int) -> dict[str, Any]:
        if rank == 1:
            time.sleep(2.5)  # longer than it takes until the supervisor is asked
        answer: dict[str, Any] = live.manager.call("next_batch", rank, 0, 0, timeout_s=60.0)
        return answer

    batch = live.call_as_ranks(ask)

    assert completions(merged(batch)) == expected_completions(0)


def test_what_an_agent_loop_generated_and_did_is_not_done_again(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, agent="pays_once", reward="", num_workers=2)
    live.publish(4)

    samples = merged(live.next_batch(0))

    assert completions(samples) == expected_completions(0, budget=10)
    assert {sample["reward"] for sample in samples.values()} == {8.0}
    payments = (tmp_path / "payments").read_text().splitlines()
    assert len(payments) == len(set(payments)) == 16
    assert (tmp_path / "marker").exists(), "one of them has died"
    assert tokens_made(live) < 16 * 10 + 5 * 16, "the first turns were replayed"
    stats = live.manager.call("stats")
    assert stats["agents"]["replayed_turns"] > 0
    assert stats["agents"]["diverged"] == 0
