"""Agent loops and rewards ask a judge, always awake or in turn, or an adapter of a pool."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from adapted_echo import ADAPTED, CRITIC_SEED
from async_tests import on_a_loop, skip_time
from live_rollouts import VOCAB_SIZE, LiveRollouts, merged, while_generating, write_tokenizer

from umbra.engines.echo.echo_engine import EchoTokens
from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.agents.auxiliary_pool import ExtendableDeadline
from umbra.runtime.rollout.agents.reward_function import RewardFunction
from umbra.runtime.rollout.agents.user_thread import UserThread
from umbra.runtime.session.session import Session

RESTART = RestartPolicy(mode="on_failure", max_restarts=5, backoff_initial_s=0.05)


def start(
    session: Session,
    folder: Path,
    *,
    colocated: bool = True,
    judge: Mapping[str, Any] | None = None,
    **settings: Any,
) -> LiveRollouts:
    """A judge, and rollouts whose user code may ask it. Tokens of the policy come slowly.

    Args:
        judge: changes to its PoolSpec.
    """
    turns: dict[str, Any] = {"mode": "colocated", "shares_with": "policy", "max_wait_s": 0.2}
    alone: dict[str, Any] = {"mode": "standalone"}
    engine: dict[str, Any] = {
        "engine": "umbra.engines.echo.echo_engine:EchoEngine",
        **(judge or {}),
    }
    session.create_pool(
        PoolSpec(
            name="judge",
            count=1,
            kwargs={"vocab_size": VOCAB_SIZE, "tick_ms": 5.0},
            load_weights=True,
            restart=RESTART,
            **(turns if colocated else alone),
            **engine,
        )
    )
    config = {"pool": "judge", "max_context_len": 128, "shares_memory": colocated}
    session.spawn(
        ActorSpec(
            name="judge-generator",
            target="umbra.runtime.rollout.dispatch.generator:GeneratorService",
            kwargs={"config": config},
            restart=RESTART,
        )
    )
    write_tokenizer(folder / "judge.json", end_token_ids=())
    asked: dict[str, Any] = {
        "generator": "judge-generator",
        "tokenizer_path": str(folder / "judge.json"),
        "timeout_s": 60.0,
        "chat_template_kwargs": {"word": "t7"},
    }
    return LiveRollouts(
        session,
        folder,
        engine={"tokens_per_s": 200.0},
        worker={"pools": {"judge": asked}, "chat_template_kwargs": {"word": "t8"}},
        config={"shares_memory": colocated, "pools_timeout_s": 60.0, "max_new_tokens": 24},
        **settings,
    )


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "standalone"])
def test_an_agent_loop_asks_a_judge(
    umbra_session: Session, tmp_path: Path, colocated: bool
) -> None:
    live = start(umbra_session, tmp_path, colocated=colocated, agent="asks_judge", reward="")

    for step in range(2):
        live.publish(step)
        samples = merged(live.next_batch(step))

        assert len(samples) == 16
        for sample in samples.values():
            assert sample["reward"] == 8.0
            assert len(sample["completion"]) == 24 + 4
            said = sample["completion"][5:9]
            asked = EchoTokens(3, sample["tokens"][: 3 + 5], vocab_size=VOCAB_SIZE)
            assert said == asked.draw(4).tokens.tolist()
            assert sum(sample["mask"]) == 24  # the judge's tokens are not trained on


@pytest.mark.process
@pytest.mark.slow
def test_chats_of_policy_and_judge_have_the_variables_of_their_own_settings(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = start(umbra_session, tmp_path, colocated=False, agent="renders_chats", reward="")

    live.publish(0)

    assert {sample["reward"] for sample in merged(live.next_batch(0)).values()} == {1.0}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["judge-generator", "judge-0", "policy-0"])
def test_a_reward_gets_its_answers_whoever_dies(
    umbra_session: Session, tmp_path: Path, victim: str
) -> None:
    live = start(umbra_session, tmp_path, reward="by_judge")
    live.publish(0)

    with while_generating(live, 60, lambda: live.signal(victim, signal.SIGKILL)):
        samples = merged(live.next_batch(0))

    assert [sample["reward"] for sample in samples.values()] == [3.0] * 16
    assert all(len(sample["completion"]) == 24 for sample in samples.values())


@pytest.mark.process
@pytest.mark.slow
def test_a_question_picks_an_adapter_of_the_judge(umbra_session: Session, tmp_path: Path) -> None:
    live = start(umbra_session, tmp_path, judge=ADAPTED, agent="asks_judges_adapter", reward="")
    live.publish(0)

    samples = merged(live.next_batch(0))

    assert len(samples) == 16
    for sample in samples.values():
        asked = EchoTokens(CRITIC_SEED, sample["tokens"][: 3 + 5], vocab_size=VOCAB_SIZE)
        assert sample["completion"][5:9] == asked.draw(4).tokens.tolist()


@pytest.mark.process
@pytest.mark.slow
def test_a_loop_whose_process_dies_asks_again(umbra_session: Session, tmp_path: Path) -> None:
    live = start(umbra_session, tmp_path, agent="dies_after_asking", reward="")
    live.publish(0)

    samples = merged(live.next_batch(0))

    assert (tmp_path / "marker").exists()
    assert [sample["reward"] for sample in samples.values()] == [1.0] * 16


@pytest.mark.process
@pytest.mark.slow
def test_an_unknown_pool_is_named_with_those_that_are_there(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = start(umbra_session, tmp_path, agent="asks_nobody", reward="")
    live.publish(0)

    errors = live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0))

    assert all("no pool 'jury'; there are: judge" in str(error) for error in errors)


def test_a_plain_function_cannot_take_the_context() -> None:
    async def load() -> None:
        async with UserThread("user") as thread:
            with pytest.raises(ConfigError, match="make it an async def"):
                RewardFunction("user_rewards:by_judge_at_once", thread, 1.0)

    asyncio.run(load())


@on_a_loop
async def test_time_before_the_start_and_in_a_pause_does_not_count_against_the_deadline() -> None:
    async def pass_time(seconds: float) -> None:
        skip_time(seconds)
        for _ in range(3):  # a timer that is due, and what it wakes
            await asyncio.sleep(0)

    async with ExtendableDeadline(10.0) as deadline:
        await pass_time(20.0)
        deadline.start()
        with deadline.paused():
            with deadline.paused():
                await pass_time(20.0)
            await pass_time(20.0)
    assert not deadline.expired

    with pytest.raises(TimeoutError):  # noqa: PT012 - the last line raises
        async with ExtendableDeadline(10.0) as deadline:
            deadline.start()
            with deadline.paused():
                await pass_time(5.0)
            await pass_time(11.0)


@pytest.mark.process
@pytest.mark.slow
def test_tokens_of_an_adapter_are_given_and_stay_when_the_loop_runs_again(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        agent="asks_adapters",
        reward="",
        pool=ADAPTED,
        config={"max_new_tokens": 15, "max_failed_share": 0.0},
    )
    live.publish(0)

    samples = merged(live.next_batch(0))

    assert (tmp_path / "marker").exists()
    assert len(samples) == 16
    for sample in samples.values():
        said = sample["completion"][5:9]
        asked = EchoTokens(CRITIC_SEED, sample["tokens"][: 3 + 5], vocab_size=VOCAB_SIZE)
        assert said == asked.draw(4).tokens.tolist()
        assert sum(sample["mask"]) == 15
        assert len(sample["completion"]) == 15 + 4 + 3
    agents = live.manager.call("stats")["agents"]
    assert agents["replayed_turns"] >= 2
    assert agents["diverged"] == 0
