"""User code may set alarms and start processes on the threads of a rollout worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from live_rollouts import USER_CODE, write_tokenizer
from rank_processes import poll

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.errors import RewardError
from umbra.runtime.process.descendants import child_pids, process_stat
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session

pytestmark = [pytest.mark.process, pytest.mark.slow]

WORKER: Final = "worker"
NUM_SAMPLES: Final = 2


def start_worker(session: Session, folder: Path, reward: str) -> SyncHandle:
    tokenizer = folder / "tokenizer.json"
    write_tokenizer(tokenizer)
    return session.spawn(
        ActorSpec(
            name=WORKER,
            target="umbra.runtime.rollout.agents.rollout_worker:RolloutWorker",
            kwargs={
                "config": {
                    "tokenizer_path": str(tokenizer),
                    "sys_path": [str(USER_CODE)],
                    "rewards": {"": reward},
                }
            },
            frees_main_thread=True,
        )
    )


def score(worker: SyncHandle) -> list[float]:
    item: dict[str, Any] = {
        "prompt": 0,
        "tokens": np.asarray([1], np.int32),
        "num_tokens": 1,
        "finish_reason": "stop",
    }
    prompts = [Prompt("p0", "t1", np.ones(1, np.int32), {}).to_score()]
    items = [item | {"sample_id": f"e0/p0/{idx}"} for idx in range(NUM_SAMPLES)]
    rewards: list[float] = worker.call("score", prompts, items, WORKER, timeout_s=30.0)["rewards"]
    return rewards


@pytest.mark.parametrize("reward", ["verifies", "verifies_in_a_coroutine"])
def test_math_verify_works_where_its_alarm_does(
    umbra_session: Session, tmp_path: Path, reward: str
) -> None:
    worker = start_worker(umbra_session, tmp_path, reward=f"verifying_rewards:{reward}")

    assert score(worker) == [1.0, 0.0]


def test_an_alarm_ends_a_reward_that_spins(umbra_session: Session, tmp_path: Path) -> None:
    worker = start_worker(umbra_session, tmp_path, reward="user_rewards:ends_by_alarm")

    assert score(worker) == [0.5] * NUM_SAMPLES


def test_an_alarm_that_a_reward_leaves_does_not_hit_the_next(
    umbra_session: Session, tmp_path: Path
) -> None:
    worker = start_worker(umbra_session, tmp_path, reward="user_rewards:leaves_an_alarm")

    assert [score(worker) for _ in range(2)] == [[1.0] * NUM_SAMPLES] * 2


def test_an_alarm_on_another_thread_is_explained(umbra_session: Session, tmp_path: Path) -> None:
    worker = start_worker(umbra_session, tmp_path, reward="user_rewards:alarms_in_a_thread")

    with pytest.raises(RewardError, match=r"signal only works in main thread") as caught:
        score(worker)
    assert "umbra runs reward functions without `async` on the main thread" in str(caught.value)
    assert "Do this in a reward function without async" in str(caught.value)


def test_what_shells_of_a_reward_leave_does_not_stay_as_zombies(
    umbra_session: Session, tmp_path: Path
) -> None:
    worker = start_worker(umbra_session, tmp_path, reward="user_rewards:leaves_processes")
    (row,) = umbra_session.supervisor_call("list_actors")

    assert score(worker) == [0.0] * NUM_SAMPLES

    def is_free_of_zombies() -> list[bool]:
        stats = [process_stat(pid) for pid in child_pids(row["pid"])]
        return [] if any(stat is not None and stat.has_ended for stat in stats) else [True]

    poll(is_free_of_zombies, 1, "an end of the worker's zombies")
