"""Rollouts with real processes: supervisor, echo engines, reward workers, manager."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from live_rollouts import VOCAB_SIZE, LiveRollouts, killing, merged, while_generating
from session_rank import SessionRank

from umbra.engines.echo.echo_engine import EchoTokens
from umbra.runtime.errors import DeadlineExceeded, RewardError
from umbra.runtime.rollout.manager.admission import PromptOrder, trajectory_seed
from umbra.runtime.session.rollouts import Rollouts
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

pytestmark = [pytest.mark.process]


class Expected(NamedTuple):
    """A sample's seed and prompt, from which all else follows."""

    seed: int
    prompt: list[int]

    def tokens_after(self, completion: list[int], count: int) -> list[int]:
        """The echo engine's completion without interruptions."""
        context = [*self.prompt, *completion]
        position = len(completion)
        rest = EchoTokens(self.seed, context, vocab_size=VOCAB_SIZE, position=position)
        return rest.draw(count).tokens.tolist()

    def two_turns(self, count: int) -> list[int]:
        """Five tokens, the two of a tool, and `count` more; see `user_agents.two_turns`."""
        first = [*self.tokens_after([], 5), 7, 9]
        return [*first, *self.tokens_after(first, count)]


def expected_samples(step: int) -> dict[str, Expected]:
    """The samples of a step by their ids."""
    order = PromptOrder(8, seed=0)
    places = [order.at(place) for place in range(step * 4, step * 4 + 4)]
    return {
        f"e{epoch}/p{idx}/{k}": Expected(trajectory_seed(0, epoch, idx, k), [idx + 1, 2, 3])
        for epoch, idx in places
        for k in range(4)
    }


def expected_completions(step: int, budget: int = 64) -> dict[str, list[int]]:
    """The expected samples of a step, with or without interruptions."""
    samples = expected_samples(step)
    return {name: sample.tokens_after([], budget) for name, sample in samples.items()}


@pytest.mark.slow
def test_ranks_share_a_batch_of_whole_scored_groups(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(umbra_session, tmp_path, config={"num_micro_batches": 2})
    live.publish(3)

    batches = live.next_batch(0)

    samples = merged(batches)
    completions = {name: sample["completion"] for name, sample in samples.items()}
    assert completions == expected_completions(0)
    assert Counter(sample["group"] for sample in samples.values()).keys() == {
        name.rpartition("/")[0] for name in completions
    }
    assert all(set(sample["versions"]) == {3} for sample in samples.values())
    assert all(sample["finish_reason"] == "length" for sample in samples.values())
    for batch in batches:
        ((micro_batches, *of_all_ranks),) = batch["mini_batches"]
        assert of_all_ranks == [16 * 64, 16]
        assert len(micro_batches) == 2
        assert batch["metrics"] == batches[0]["metrics"]
    rewards = [sample["reward"] for sample in samples.values()]
    assert batches[0]["metrics"]["reward_mean"] == pytest.approx(np.mean(rewards))
    for group in {sample["group"] for sample in samples.values()}:
        members = [sample for _, sample in sorted(samples.items()) if sample["group"] == group]
        rewards = [sample["reward"] for sample in members]
        assert all(sample["group_rewards"] == rewards for sample in members)


@pytest.mark.slow
def test_the_progress_of_a_batch_and_of_an_evaluation_are_told_apart(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, engine={"tokens_per_s": 60.0})
    rollouts = Rollouts(umbra_session, "rollouts")
    seen: list[tuple[int, int] | tuple[int, int, str] | None] = []
    live.publish(1)

    with while_generating(live, 10, lambda: seen.append(rollouts.batch_progress())):
        live.next_batch(0)
    seen.append(rollouts.evaluation_progress())
    with while_generating(live, 10, lambda: seen.append(rollouts.evaluation_progress())):
        num_prompts = live.evaluate(0)[0]["num_prompts"]

    assert seen == [(0, 4, ""), None, (0, num_prompts)]


@pytest.mark.slow
def test_a_pool_of_one_engine_that_is_killed_asks_the_ranks_for_weights(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, num_engines=1, engine={"tokens_per_s": 60.0})
    live.publish(5)

    with killing(live, "policy-0", after_tokens=100):
        batches = live.next_batch(0)

    samples, metrics = merged(batches), batches[0]["metrics"]
    assert metrics["engine_idle_share"] > metrics["engine_no_work_share"]  # dead, then starting
    assert live.num_syncs_served == 1
    assert {name: s["completion"] for name, s in samples.items()} == expected_completions(0)
    assert live.manager.call("stats")["engines"] == "policy-0#2 SERVING"


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["abort", "keep", "drain"])
def test_a_sync_in_mid_generation_only_changes_versions(
    umbra_session: Session, tmp_path: Path, on_update: str
) -> None:
    live = LiveRollouts(
        umbra_session, tmp_path, engine={"tokens_per_s": 60.0}, pool={"on_update": on_update}
    )
    live.publish(1)

    with while_generating(live, 100, lambda: live.publish(2)):
        batches = live.next_batch(0)

    samples = merged(batches)
    assert {name: s["completion"] for name, s in samples.items()} == expected_completions(0)
    versions = [sample["versions"] for sample in samples.values()]
    assert all(sorted(v) == v for v in versions)
    num_mixed = sum(set(v) == {1, 2} for v in versions)
    assert (num_mixed > 0) == (on_update != "drain")
    assert batches[0]["metrics"]["interruptions"] == (num_mixed if on_update == "abort" else 0)
    assert batches[0]["metrics"]["version_min"] == 1
    assert 0 < batches[0]["metrics"]["engine_idle_share"] < 0.9


@pytest.mark.slow
def test_held_out_prompts_are_scored_greedily(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(
        umbra_session, tmp_path, reward="starts_with_answer", config={"accuracy_threshold": 0.5}
    )
    live.publish(0)

    answers = live.evaluate(0)

    assert answers[0] == answers[1]
    assert answers[0]["kind"] == "eval"
    assert answers[0]["num_prompts"] == 8
    assert answers[0]["tokens"] == 8 * 64
    assert 0.0 <= answers[0]["accuracy"] == answers[0]["mean_reward"] <= 1.0
    rewards = [sample["reward"] for sample in answers[0]["samples"]]
    assert len(rewards) == 6
    assert rewards == sorted(rewards)
    assert all(len(sample["tokens"]) == 64 for sample in answers[0]["samples"])


@pytest.mark.slow
def test_an_evaluation_beside_batches_continues_under_later_weights_until_ranks_ask_for_it(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, engine={"tokens_per_s": 60.0})
    rollouts = Rollouts(umbra_session, "rollouts")
    live.publish(1)

    for _ in range(2):
        rollouts.begin_evaluation(0, 0.0)
    begun = rollouts.is_evaluated()
    with while_generating(live, 100, lambda: live.publish(2)):
        live.next_batch(0)
    one, other = live.evaluate(0)

    assert not begun
    assert one == other
    tokens = dict(one["versions"])
    assert sorted(tokens) == [1, 2]
    assert sum(tokens.values()) == one["tokens"] == 8 * 64
    assert rollouts.is_evaluated()


@pytest.mark.slow
def test_a_bad_reward_fails_every_rank_in_this_step_and_later(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, reward="raises")
    live.publish(0)

    failures = live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0))

    for failure in [*failures, live.failure_of_next_batch(0, 1)]:
        assert isinstance(failure, RewardError)
        assert "user_rewards:raises raised KeyError: 'no such answer'" in str(failure)


@pytest.mark.slow
def test_a_request_that_an_engine_refuses_fails_with_its_words(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(
        umbra_session, tmp_path, engine={"max_context_len": 32}, config={"max_context_len": 64}
    )
    live.publish(0)

    failures = live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0))

    for failure in failures:
        assert "refused a request: " in str(failure)
        assert "32" in str(failure)


@pytest.mark.slow
def test_a_pool_that_never_serves_is_named_with_its_states(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path, config={"engine_timeout_s": 0.5})

    failures = live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0))

    for failure in failures:
        assert "no engine of pool 'policy' has served for 0.5 s" in str(failure)
        assert "policy-0#1 PENDING_WEIGHTS, policy-1#1 PENDING_WEIGHTS" in str(failure)


@pytest.mark.slow
def test_agent_turns_are_appended_as_tokens(umbra_session: Session, tmp_path: Path) -> None:
    live = LiveRollouts(umbra_session, tmp_path, agent="two_turns", config={"max_new_tokens": 12})
    live.publish(4)

    samples = merged(live.next_batch(0))

    for name, expected in expected_samples(0).items():
        sample = samples[name]
        assert sample["completion"] == expected.two_turns(7)
        assert sample["mask"] == [0] * 3 + [1] * 5 + [0] * 2 + [1] * 7
        assert sample["versions"] == [4] * 12
        assert sample["finish_reason"] == "length"
        assert sample["reward"] > 0


def pause_again_and_again(session: Session) -> None:
    while True:
        session.supervisor_call("pool_pause", "policy", "abort", 0.2)


@pytest.mark.slow
def test_a_pool_is_left_alone_while_a_sync_is_under_way(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session, tmp_path)
    live.publish(0)
    weights = {"w": torch.zeros(10)}
    first, second = (
        WeightPublisher(SessionRank(umbra_session, rank, 2), weights) for rank in range(2)
    )

    with ThreadPoolExecutor(1) as side:
        waiting = side.submit(first.publish, "policy", 1, 20.0)
        with pytest.raises(DeadlineExceeded, match="a weight sync is in progress"):
            pause_again_and_again(umbra_session)
        second.publish("policy", 1, 20.0)
        waiting.result(60.0)

    live.session.supervisor_call("pool_pause", "policy", "abort", 5.0)
    assert {state["state"] for state in live.session.pool("policy").states()} == {"PAUSED"}
