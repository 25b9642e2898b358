"""What `umbra top` shows of a job, and Ctrl-C while it asks."""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.runtime.cli import top_command
from umbra.runtime.cli.top_command import RunSnapshot, frame
from umbra.runtime.cluster.run_events import RunEvent
from umbra.runtime.errors import DeadlineExceeded, UmbraError
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
MORE = {
    "rollout/reward_max": 1.0,
    "rollout/staleness_mean": 0.5,
    "sync/version": 7.0,
    "rollout/engine_idle_share": 0.125,
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


FRAME = """\
r   step 2/10   [####----------------]   eta 0:16   last step 0:03 ago
reward 0.431   best 1.000   tok/s 17,204   staleness 0.50   version 7   engines idle 12%
step 2.00 s = rollout 1.00 + train 0.75 + sync 0.12 + sleep 0.00 + other 0.12

now: the ranks wait for next_batch for step 3: 1 of 4 groups ready, 12 trajectories in flight, 5 wait for an engine
FAILED: it is lost
node-1 does not answer: no route

RANKS      WAIT FOR                                       SECONDS  PIDS
0,1        rollouts: next_batch for step 3                    2.5  0,1
2,3,4,5,6  sync of version 8                                  6.0  32,33,34,35,…
7          no call: they compute, or wait for each other           37

ENGINE     NODE  GPUS  PID  STATE     SINCE  VERSION  RUNNING  WAITING  RESTARTS
policy-0   host     0   40  DEAD       1:03        7        8        0         0
policy-26  -        -   66  STARTING   1:03        -        -        -         2
policy-1   host     1   41  SERVING    1:03        7        8        0         0
… and 24 more: 24 SERVING

groups: 6 open, 1 ready, 2 in training; done: 7 trained, 1 dropped
trajectories: 12 open with 12,345 tokens, 5 wait for an engine

other processes: worker-0 RUNNING (1 restarts)

TIME      EVENT       WHO       WHAT
00:00:00  restart     policy-0  it died\\x1b[2J
00:01:03  checkpoint  rollouts  after step 3
00:01:10  note
00:01:11  note
00:01:12  note
"""  # noqa: E501


def test_a_frame_shows_progress_waits_engines_that_fit_and_the_newest_events() -> None:
    state = job(26)
    new = replace(
        engine(26, "STARTING"),
        node_id="", gpus=(), version=None, running=None, waiting=None, num_restarts=2,
    )  # fmt: skip
    (near,), (pool,) = state.nodes, state.pools
    syncing = [
        RankStatus(rank=rank, pid=30 + rank, waits_for="sync of version 8", waits_s=float(rank))
        for rank in range(2, 7)
    ]
    state = replace(
        state,
        nodes=(
            replace(near, ranks=(*near.ranks, *syncing, RankStatus(rank=7, pid=37))),
            NodeStatus(name="node-1", node_id="b", problem="no route"),
        ),
        pools=(replace(pool, engines=(*pool.engines, new)),),
        failure="it is lost\nTraceback",
        rollouts=replace(
            ROLLOUTS, groups_leased=2, groups_trained=7, groups_dropped=1, tokens=12_345
        ),
    )
    midnight = time.mktime((2026, 1, 2, 0, 0, 0, 0, 0, -1))
    died = RunEvent(time=midnight, kind="restart", who="policy-0", text="it died\x1b[2J\nTrace")
    saved = [
        RunEvent(
            time=midnight + 60 + step, kind="checkpoint", who="rollouts", text=f"after step {step}"
        )
        for step in (1, 2, 3)
    ]
    notes = [RunEvent(time=midnight + 70 + idx, kind="note", who="", text="") for idx in range(3)]
    steps = [ROW, ROW | MORE | {"step": 2, "time": 94.0, "time/left_s": 16.0}]
    events = [died, saved[0], died, *saved[1:], *notes]
    view = RunSnapshot(name="r", state=state, steps=steps, total_steps=10, events=events)

    assert frame(view, 97.0, width=120, height=23) == FRAME.splitlines()
    assert len(frame(view, 97.0, width=120)) == len(FRAME.splitlines()) + 23


def test_a_run_without_a_job_or_a_step_is_shown_so() -> None:
    lines = ["r   no step is done yet", "", "no job of this run is running on this machine"]
    assert frame(RunSnapshot(name="r", state=None), 0.0, width=80) == lines
    assert frame(RunSnapshot(name="r", state=None, problem="late"), 0.0, width=80)[2:] == ["late"]


def test_without_a_terminal_frames_are_printed_until_the_job_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[JobState | UmbraError | None] = [job(1), DeadlineExceeded("late"), None]
    waits: list[float] = []

    async def job_state(run_dir: Path) -> JobState | None:
        answer = answers.pop(0)
        if isinstance(answer, UmbraError):
            raise answer
        return answer

    monkeypatch.setattr(top_command, "job_state", job_state)
    monkeypatch.setattr(top_command, "time", SimpleNamespace(time=time.time, sleep=waits.append))

    assert top_command.run(Namespace(run_dir=tmp_path, once=False)) == 0

    shown = capsys.readouterr().out
    assert (waits, answers) == ([1.0, 1.0], [])
    assert shown.count("no step is done yet\n") == 3
    assert "\nthe supervisor does not answer (late); see umbra dump\n" in shown
    answers.append(job(1))
    assert top_command.run(Namespace(run_dir=tmp_path, once=True)) == 0


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
