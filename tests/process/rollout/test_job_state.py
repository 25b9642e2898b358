"""What a running job says of itself: `umbra.runtime.reports.job_state`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from live_rollouts import LiveRollouts
from session_rank import SessionRank

from umbra.runtime.cluster.run_events import read_events
from umbra.runtime.errors import JobFailed, WeightSyncError
from umbra.runtime.reports.job_state import JobState, job_state
from umbra.runtime.session.rollouts import Rollouts
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]


def wait_for(run_dir: Path, is_so: Callable[[JobState], bool]) -> JobState:
    """The first state of the job for which that holds."""
    deadline = time.monotonic() + 60.0
    while True:
        state = asyncio.run(job_state(run_dir))
        assert state is not None
        if is_so(state):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def engine_states(state: JobState) -> dict[str, str]:
    return {engine.name: engine.state for _, engine in state.engines}


def test_the_state_shows_engines_queues_and_who_waits(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    session = umbra_session_factory()
    run_dir = umbra_session_factory.run_dirs[0]
    live = LiveRollouts(session, tmp_path)
    live.publish(3)
    live.signal("rewards-0", signal.SIGSTOP)  # so the batch is not complete
    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(live.manager.call, "next_batch", 0, 0, 3, timeout_s=60.0)
        early = wait_for(run_dir, lambda s: s.rollouts is not None and s.rollouts.call != "")
        second = ranks.submit(live.manager.call, "next_batch", 1, 0, 3, timeout_s=60.0)
        full = wait_for(
            run_dir,
            lambda s: (
                s.rollouts is not None
                and len(s.rollouts.waiting_ranks) == 2
                and s.rollouts.groups_scoring > 0
            ),
        )
        _, _, waits = Rollouts(session, "rollouts").batch_progress()
        live.signal("rewards-0", signal.SIGCONT)
        first.result()
        second.result()
    done = wait_for(run_dir, lambda s: s.rollouts is not None and s.rollouts.call == "")

    live.signal("rollouts", signal.SIGSTOP)
    silent = asyncio.run(job_state(run_dir))
    live.signal("rollouts", signal.SIGCONT)

    assert silent is not None
    assert silent.phase.startswith("rollouts does not answer: ")
    assert early.rollouts is not None
    assert full.rollouts is not None
    assert done.rollouts is not None
    assert early.rollouts.waiting_ranks == (0,)
    assert full.rollouts.waiting_ranks == (0, 1)
    assert full.rollouts.step == 1
    assert full.rollouts.scoring_s > 0
    assert waits.endswith(" wait for the reward function")
    assert f"{full.rollouts.groups_scoring} wait for the reward function, for 0:0" in full.phase
    pid = live.processes()["rewards-0"]["pid"]
    assert full.stopped == [
        f"rewards-0 (pid {pid}) is stopped by a signal: kill -CONT {pid} lets it continue"
    ]
    assert done.rollouts.groups_scoring == 0
    assert done.stopped == []
    assert "the ranks wait for next_batch for step 1: " in full.phase
    assert full.rollouts.waiting_ages_s[0] > full.rollouts.waiting_ages_s[1] >= 0
    (rank,) = full.ranks
    assert (rank.rank, rank.pid) == (0, os.getpid())
    assert rank.waits_for == "rollouts: next_batch for step 1"
    assert full.pools[0].version == 3
    assert engine_states(full) == {"policy-0": "SERVING", "policy-1": "SERVING"}
    assert {engine.version for _, engine in full.engines} == {3}
    assert {actor.name for actor in full.nodes[0].actors} == set(live.processes())
    assert done.rollouts.groups_leased == 4
    assert done.phase.startswith("the ranks train")


def test_a_killed_engine_is_starting_until_its_next_process_is_ready(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    session = umbra_session_factory()
    run_dir = umbra_session_factory.run_dirs[0]
    live = LiveRollouts(session, tmp_path)
    live.publish(0)

    live.signal("policy-0", signal.SIGKILL)
    dead = wait_for(run_dir, lambda s: engine_states(s)["policy-0"] == "STARTING")
    back = wait_for(run_dir, lambda s: engine_states(s)["policy-0"] == "PENDING_WEIGHTS")

    (_, lost), (_, other) = dead.engines
    assert (lost.running, lost.version, other.running, other.version) == (None, None, 0, 0)
    assert [engine.num_restarts for _, engine in back.engines] == [1, 0]
    umbra_session_factory.close()
    assert asyncio.run(job_state(run_dir)) is None


def test_a_killed_engine_and_a_checkpoint_are_events_of_the_run_directory(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    session = umbra_session_factory()
    run_dir = umbra_session_factory.run_dirs[0]
    live = LiveRollouts(session, tmp_path, world_size=1)
    live.publish(0)
    live.next_batch(0)
    live.signal("policy-0", signal.SIGKILL)
    wait_for(run_dir, lambda s: engine_states(s)["policy-0"] == "PENDING_WEIGHTS")
    live.publish(0)
    live.manager.call("checkpointed", 1, 0, [1])
    half = WeightPublisher(SessionRank(session, 0, 2), {"w": torch.zeros(10)})
    with pytest.raises(WeightSyncError):
        half.publish("policy", 1, 0.5)  # the other rank does not come
    session.supervisor_call("fail_job", "rank 0", "it had enough")
    with contextlib.suppress(JobFailed):
        umbra_session_factory.close()

    events = [(event.kind, event.who, event.text) for event in read_events(run_dir)]
    died, *rest = [event for event in events if event[0] != "note"]
    assert died[:2] == ("restart", "policy-0")
    assert "killed by SIGKILL" in died[2]
    assert rest == [
        ("serves", "policy-0", "policy-0#2 serves again, version 0"),
        ("checkpoint", "rollouts", "after step 1, version 0"),
        ("sync_failed", "policy", rest[2][2]),
        ("failed", "job", "rank 0 failed: it had enough"),
    ]
    assert rest[2][2].startswith("the sync of version 1 was aborted: ")
