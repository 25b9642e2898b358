"""What `umbra top` shows of a job, and Ctrl-C while it asks."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from umbra.runtime.cli.top_command import RunSnapshot, frame
from umbra.runtime.cluster.run_events import RunEvent
from umbra.runtime.reports.job_state import (
    ActorStatus,
    EngineStatus,
    JobState,
    NodeStatus,
    PoolStatus,
    RankStatus,
    RolloutStatus,
    describe_phase,
    run_interruptibly,
)

ROW = {
    "rollout/reward_mean": 0.4314,
    "rollout/tokens_per_s": 17204.0,
    "time/step_s": 2.0,
    "time/rollout_s": 1.0,
    "time/train_s": 0.75,
    "time/sync_s": 0.125,
}
ROLLOUTS = RolloutStatus(
    name="rollouts", call="next_batch for step 3", waiting_ranks=(0, 1), waiting_ages_s=(2.5, 2.5),
    step=3, groups_per_step=4, groups_open=6, groups_ready=1, trajectories_open=12, turns_waiting=5,
)  # fmt: skip


def engine(idx: int, state: str = "SERVING") -> EngineStatus:
    return EngineStatus(
        name=f"policy-{idx}", node_id="host", pid=40 + idx, state=state, state_age_s=63.0,
        incarnation=1, version=7, num_restarts=0, gpus=(str(idx),), running=8, waiting=0,
    )  # fmt: skip


def job(num_engines: int) -> JobState:
    engines = [engine(0, "DEAD"), *(engine(idx) for idx in range(1, num_engines))]
    pool = PoolStatus(name="policy", mode="standalone", version=7, engines=tuple(engines))
    waits = "rollouts: next_batch for step 3"
    worker = ActorStatus(
        name="worker-0", role="rollout", state="RUNNING", pid=9, incarnation=2, num_restarts=1
    )
    node = NodeStatus(
        name="node-0",
        node_id="host",
        ranks=tuple(RankStatus(rank=r, pid=r, waits_for=waits, waits_s=2.5) for r in range(2)),
        actors=(worker,),
    )
    return JobState(
        job="x",
        time=100.0,
        phase=describe_phase([0, 1], [pool], ROLLOUTS),
        failure="",
        nodes=(node,),
        pools=(pool,),
        rollouts=ROLLOUTS,
    )


def test_a_frame_shows_progress_engines_waits_and_events() -> None:
    steps = [ROW | {"step": 2, "time": 94.0, "time/left_s": 16.0}]
    died = RunEvent(time=0.0, kind="restart", who="policy-0", text="it died\x1b[2J\nTraceback")
    view = RunSnapshot(name="r", state=job(2), steps=steps, total_steps=10, events=[died])

    lines = frame(view, 97.0, width=120)

    assert lines[0] == "r   step 2/10   [####----------------]   eta 0:16   last step 0:03 ago"
    assert lines[1] == "reward 0.431   tok/s 17,204"
    assert lines[2] == (
        "step 2.00 s = rollout 1.00 + train 0.75 + sync 0.12 + sleep 0.00 + other 0.12"
    )
    assert lines[4] == (
        "now: the ranks wait for next_batch for step 3: 1 of 4 groups ready, "
        "12 trajectories in flight, 5 wait for an engine"
    )
    assert "0,1    rollouts: next_batch for step 3      2.5  0,1" in lines
    assert "policy-0  host     0   40  DEAD      1:03        7        8        0         0" in lines
    assert "other processes: worker-0 RUNNING (1 restarts)" in lines
    assert lines[-1].split() == [lines[-1][:8], "restart", "policy-0", "it", "died\\x1b[2J"]


def test_a_stopped_rank_and_a_slow_reward_are_shown_within_80_columns() -> None:
    state = job(1)
    stuck = replace(ROLLOUTS, groups_ready=3, groups_scoring=4, scoring_s=13.0, groups_at_teacher=2)
    ranks = (
        RankStatus(rank=0, pid=3547),
        RankStatus(rank=1, pid=3548, is_stopped=True),
    )
    worker = replace(state.nodes[0].actors[0], is_stopped=True)
    engine_process = replace(worker, name="policy-0", role="engine", pid=40)
    node = replace(state.nodes[0], ranks=ranks, actors=(worker, engine_process))
    phase = describe_phase([0, 1], state.pools, stuck)
    state = replace(state, nodes=(node,), rollouts=stuck, phase=phase)

    lines = frame(RunSnapshot(name="r", run_dir="runs/r", state=state), 0.0, width=80)

    text = " ".join(line.strip() for line in lines)
    assert "3 of 4 groups ready" in text
    assert "4 wait for the reward function, for 0:13, 2 wait for the teacher" in text
    assert "rank 1 (pid 3548) is stopped by a signal: kill -CONT 3548 lets it continue" in lines
    assert "`umbra dump runs/r` shows where every process is" in lines
    table = [" ".join(line.split()) for line in lines]
    assert "0 no call: they compute, or wait for each other 3547" in table
    assert "1 STOPPED 3548" in table
    (row,) = [line for line in lines if line.startswith("policy-0  ")]
    assert row.split()[4] == "STOPPED"
    assert "other processes: worker-0 stopped by a signal (1 restarts)" in lines


def test_a_long_wait_or_step_is_a_reason_to_look_at_a_dump() -> None:
    def has_hint(age_s: float, step_s: float, waits_s: float = 0.0) -> bool:
        rows = [ROW | {"step": 1, "time": 100.0, "time/step_s": step_s}]
        state = job(1)
        ranks = (RankStatus(rank=0, pid=1, waits_for="x", waits_s=waits_s),)
        state = replace(state, nodes=(replace(state.nodes[0], ranks=ranks),))
        lines = frame(RunSnapshot(name="r", state=state, steps=rows), 100.0 + age_s, width=80)
        return any("umbra dump RUN_DIR" in line for line in lines)

    assert not has_hint(age_s=29.0, step_s=1.0)
    assert has_hint(age_s=31.0, step_s=1.0)
    assert not has_hint(age_s=299.0, step_s=100.0)
    assert has_hint(age_s=301.0, step_s=100.0)
    assert has_hint(age_s=0.0, step_s=1.0, waits_s=31.0)


def test_engines_that_do_not_fit_are_summed_up_and_those_that_do_not_serve_come_first() -> None:
    lines = frame(RunSnapshot(name="r", state=job(64)), 0.0, width=120, height=24)

    table = [line for line in lines if line.startswith("policy-")]
    assert [line.split()[4] for line in table] == ["DEAD", "SERVING", "SERVING", "SERVING"]
    assert "… and 60 more: 60 SERVING" in lines
    assert len(lines) <= 24


def test_the_phase_names_the_rank_that_others_wait_for() -> None:
    (pool,) = job(1).pools
    syncing = replace(pool, sync_version=8, sync_phase="gathering", sync_ranks=(1,))
    late = replace(ROLLOUTS, waiting_ranks=(0,), waiting_ages_s=(1.0,))

    assert describe_phase([0, 1, 2], [syncing], ROLLOUTS) == (
        "rank 1 would sync weights of version 8 to pool policy, and waits for ranks 0, 2"
    )
    assert describe_phase([0, 1], [pool], late) == (
        "rank 0 waits for rank 1 to call next_batch for step 3"
    )
    training = replace(ROLLOUTS, call="", waiting_ranks=(), waiting_ages_s=())
    assert describe_phase([0], [pool], training).startswith("the ranks train: ")
    assert describe_phase([0], [pool], None) == "the run is starting"


def test_checkpoints_do_not_push_a_restart_out_of_sight() -> None:
    died = RunEvent(time=0.0, kind="restart", who="policy-0", text="it died")
    saved = [
        RunEvent(time=float(step), kind="checkpoint", who="rollouts", text=f"after step {step}")
        for step in range(20, 200, 20)
    ]
    view = RunSnapshot(name="r", state=None, events=[saved[0], died, *saved[1:]])

    lines = frame(view, 200.0, width=120)

    shown = [line for line in lines if "it died" in line or "after step" in line]
    assert [line.rpartition("  ")[2] for line in shown] == ["it died", "after step 180"]


def test_ctrl_c_is_not_lost_where_a_call_does_not_wait() -> None:
    async def never_waits() -> str:
        signal.raise_signal(signal.SIGINT)
        return "nothing runs"

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(never_waits())
    finally:
        signal.signal(signal.SIGINT, former)
