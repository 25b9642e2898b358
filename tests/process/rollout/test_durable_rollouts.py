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
from test_live_rollouts import expected_completions, expected_samples, pause_again_and_again

from umbra.runtime.errors import DeadlineExceeded, LedgerError
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.sample_accounts import SampleState
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


def text_of(tokens: list[int]) -> str:
    """As `write_tokenizer` decodes them."""
    return " ".join(f"t{token}" for token in tokens)


def until_stop(completion: list[int], stop: str) -> list[int]:
    """The tokens up to the one that completes a stop text."""
    beginnings = (completion[:num] for num in range(1, len(completion)))
    return next((tokens for tokens in beginnings if stop in text_of(tokens)), completion)


def test_stop_texts_are_found_across_the_deaths_of_engine_and_manager(
    umbra_session: Session, tmp_path: Path
) -> None:
    config = {"stop": ("7 t1",), "tokenizer_path": str(tmp_path / "tokenizer.json")}
    live = LiveRollouts(umbra_session, tmp_path, engine={"tokens_per_s": 60.0}, config=config)
    live.publish(1)

    with (
        killing(live, "policy-0", after_tokens=100),
        killing(live, "rollouts", after_tokens=250),
    ):
        samples = merged(live.next_batch(0))
    made = tokens_made(live)
    evaluation = live.evaluate(0)[0]

    expected = {name: until_stop(c, "7 t1") for name, c in expected_completions(0).items()}
    assert completions(samples) == expected
    for name, sample in samples.items():
        is_stopped = "7 t1" in text_of(expected[name])
        assert sample["finish_reason"] == ("stop" if is_stopped else "length")
        assert len(sample["logprobs"]) == len(expected[name])
    assert evaluation["tokens"] < 8 * 64
    for sample in evaluation["samples"]:
        assert sample["tokens"] == until_stop(sample["tokens"], "7 t1")
    # The engines stop, too: they make less than half of what they would make if they did not.
    too_many = tokens_made(live) - made - evaluation["tokens"]
    assert too_many < (8 * 64 - evaluation["tokens"]) / 2


def test_killed_between_batches_it_delivers_the_next_as_if_undisturbed(
    umbra_session: Session, tmp_path: Path
) -> None:
    settings = {"max_staleness": 1, "groups_per_step": 2}
    live = LiveRollouts(umbra_session, tmp_path, config=settings, engine={"tokens_per_s": 200.0})
    order = [*expected_completions(0).items(), *expected_completions(1).items()]
    for step in range(4):
        live.announce(step, step)
        live.publish(step)
        batch = merged(live.next_batch(step))
        assert completions(batch) == dict(order[8 * step : 8 * step + 8])
        live.signal("rollouts", signal.SIGKILL)
        again = merged(live.next_batch(step))
        assert again == batch, "asked anew for the same step"

    state = ledger_of(live)
    assert state.counts[SampleState.TRAINED] == 8 * 3
    assert state.counts[SampleState.DROPPED] == 0


def test_a_killed_manager_resumes_from_its_newest_snapshot(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        config={"max_staleness": 1, "groups_per_step": 2},
        manager="frequent_snapshots:FrequentSnapshots",
    )
    order = [*expected_completions(0).items(), *expected_completions(1).items()]
    for step in range(4):
        live.announce(step, step)
        live.publish(step)
        batch = merged(live.next_batch(step))
        assert completions(batch) == dict(order[8 * step : 8 * step + 8])
        if step:
            wait_for_snapshot(live, step)
            live.replace_manager()
        assert merged(live.next_batch(step)) == batch

    state = ledger_of(live)
    assert state.counts[SampleState.TRAINED] == 8 * 3
    log = (umbra_session.log_dir / "rollouts.log").read_text()
    assert log.count(" bytes of the ledger behind 00000") == 3, log


def wait_for_snapshot(live: LiveRollouts, steps_done: int) -> None:
    """Until there is one with so many steps."""
    deadline = time.monotonic() + 60.0
    while not list(live.ledger_path.glob(f"[0-9]*-{steps_done}.snapshot")):
        assert time.monotonic() < deadline, [*live.ledger_path.iterdir()]
        time.sleep(0.01)


def wait_for_progress(live: LiveRollouts, name: str, count: int) -> None:
    """Until `stats` counts so many; nothing that a rank calls."""
    deadline = time.monotonic() + 60.0
    while (found := live.manager.call("stats")["training"][name]) < count:
        assert time.monotonic() < deadline, f"{found} {name}"
        time.sleep(0.002)


def test_killed_while_the_ranks_train_it_resumes_before_they_ask(
    umbra_session: Session, tmp_path: Path
) -> None:
    settings = {"max_staleness": 1, "groups_per_step": 2}
    live = LiveRollouts(umbra_session, tmp_path, config=settings, engine={"tokens_per_s": 200.0})
    order = [*expected_completions(0).items(), *expected_completions(1).items()]
    live.announce(0, 0)
    live.publish(0)
    live.next_batch(0)

    live.replace_manager()
    wait_for_progress(live, "groups_ready", 2)
    live.replace_manager()
    wait_for_progress(live, "groups_ready", 2)
    live.announce(1, 1)
    live.publish(1)
    batch = merged(live.next_batch(1))

    assert completions(batch) == dict(order[8:16])
    assert all(set(sample["versions"]) == {0} for sample in batch.values())
    assert ledger_of(live).counts[SampleState.TRAINED] == 8


def test_a_manager_that_went_on_by_itself_still_takes_back(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, config={"max_staleness": 1})
    batches: list[dict[str, dict[str, Any]]] = []
    for step in range(2):
        live.announce(step, step)
        live.publish(step)
        batches.append(merged(live.next_batch(step)))
    live.replace_manager()
    wait_for_progress(live, "groups_ready", 4)

    live.manager.call("begin", 0, 0, "")
    live.announce(10, 0)
    live.publish(10)

    assert completions(merged(live.next_batch(0))) == completions(batches[0])
    state = ledger_of(live)
    assert state.totals.restores == 1
    assert state.counts[SampleState.LEASED] == 16


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


def test_after_a_rollback_an_evaluation_is_repeated(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.publish(0)
    evaluation = live.evaluate(0)
    made = tokens_made(live)

    live.replace_manager()
    assert live.evaluate(0) == evaluation
    assert tokens_made(live) == made
    live.manager.call("begin", 0, 0, "")

    assert live.evaluate(0)[0]["accuracy"] == evaluation[0]["accuracy"]
    assert tokens_made(live) > made


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


def test_a_rollback_takes_back_what_came_after_the_checkpoint(
    umbra_session: Session, tmp_path: Path
) -> None:
    """A snapshot of the ledger is taken after each step, also after the checkpoint."""
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        config={"max_staleness": 1},
        manager="frequent_snapshots:FrequentSnapshots",
    )
    steps = {1: 0, 2: 1, 3: 2, 4: 3, 12: 2, 13: 3}  # of versions
    batches: list[dict[str, dict[str, Any]]] = []
    position = ""
    for step in range(4):
        live.announce(step + 1, step)
        live.publish(step + 1)
        batches.append(merged(live.next_batch(step)))
        if step == 1:  # after the step that the batch of step 1 was for
            position = live.manager.call("position")
            live.manager.call("checkpointed", 2, 2, [2])
    wait_for_progress(live, "groups_ready", 4)  # with weights that came after the checkpoint
    made = tokens_made(live)
    wait_for_snapshot(live, 3)

    kept = live.manager.call("begin", 2, 2, position)
    for step in (2, 3):
        live.announce(step + 10, step)
        live.publish(step + 10)
        again = merged(live.next_batch(step))
        assert completions(again) == completions(batches[step]), "the same prompts, seeds, order"
        ages = [step - steps[v] for sample in again.values() for v in sample["versions"]]
        assert 0 <= min(ages) <= max(ages) <= 1
        if step == 2:
            assert again == batches[2], "it was made before the checkpoint: nothing is made anew"

    assert kept["groups"] > 0
    wait_for_progress(live, "groups_ready", 4)
    assert tokens_made(live) > made
    state = ledger_of(live)
    assert state.totals.restores == 1
    assert state.totals.rolled_back_tokens > 0
    assert state.counts[SampleState.DROPPED] == 0
    assert state.counts[SampleState.TRAINED] == 16 * 3


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


def test_agent_loops_continue_under_a_new_manager(umbra_session: Session, tmp_path: Path) -> None:
    settings = {"max_new_tokens": 40}
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        agent="two_turns",
        config=settings,
        engine={"tokens_per_s": 40.0},
    )
    live.publish(4)

    with killing_manager(live, after_tokens_on_disk=400):  # in the second turn
        samples = merged(live.next_batch(0))

    for name, expected in expected_samples(0).items():
        assert samples[name]["completion"] == expected.two_turns(35)
        assert samples[name]["mask"] == [0] * 3 + [1] * 5 + [0] * 2 + [1] * 35
    assert live.manager.call("stats")["agents"]["replayed_turns"] >= 16
    assert tokens_made(live) <= 16 * 40 + (16 * 40 - 400)
    assert ledger_of(live).counts[SampleState.LEASED] == 16


def test_a_loop_that_fails_costs_its_group_and_is_accounted_for(
    umbra_session: Session, tmp_path: Path
) -> None:
    settings = {"max_failed_share": 0.9, "agent_timeout_s": 2.0, "agent_retries": 1}
    live = LiveRollouts(
        umbra_session, tmp_path, agent="raises_for_some", reward="", config=settings
    )
    live.publish(4)

    batch = live.next_batch(0)
    again = live.next_batch(0)

    prompts = {group.partition("/")[2] for group in batch[0]["group_ids"] + batch[1]["group_ids"]}
    assert merged(again) == merged(batch)
    assert not prompts & {"p2", "p3"}, "t3 and t4 are their prompts"
    state = ledger_of(live)
    dropped = state.drop_reasons["agent loop failed"]
    assert dropped == state.counts[SampleState.DROPPED]
    assert dropped in (4, 8)
    assert state.counts[SampleState.LEASED] == 16
