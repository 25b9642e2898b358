"""Processes that a run can lose for a moment: they come back, and training continues."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from whole_runs import Run, start_run

from umbra.runtime.rpc.loop_socket import SILENCE_LIMIT_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 4000
LONG = f"train.steps={STEPS}"
KILLED = r"killed by SIGKILL \(9\); restarting it in [\d.]+ s$"


def check_goes_on(run: Run) -> None:
    """Asserts that further steps follow; then stops the run."""
    run.wait_for_step(run.num_steps() + 3, timeout_s=30.0)
    os.kill(run.process.pid, signal.SIGTERM)
    ended = run.wait()
    assert f"stopped by SIGTERM after {run.num_steps()} steps" in ended.output
    assert "JobFailed" not in ended.output


def test_a_signal_to_one_actor_alone_replaces_it(folder: Path) -> None:
    with start_run(folder, LONG, num_ranks=0) as run:
        run.wait_for_step(1)
        for name in ("policy-0", "rollouts", "worker-0"):
            os.kill(run.pid_of(name), signal.SIGTERM)
            run.wait_for_restart(name)
            run.wait_for_step(run.num_steps() + 2, timeout_s=30.0)
        check_goes_on(run)

    for name in ("policy-0", "rollouts", "worker-0"):
        how = r"\) stopped by SIGTERM \(exit status 143\); restarting it in [\d.]+ s$"
        assert _says(run, rf"{name}#1 \(pid \d+{how}"), run.output


def test_an_engine_that_is_killed_in_its_first_start_is_started_again(folder: Path) -> None:
    engine = "pool.engine=failing_engines:KilledInFirstStart"

    with start_run(folder, "train.steps=2", engine, num_ranks=0) as run:
        ended = run.wait()

    assert ended.status == 0, ended.output
    assert run.num_steps() == 2
    how = r"policy-0#1 failed to start: policy-0#1 \(pid \d+\) "
    assert re.search(how + KILLED, ended.output, re.MULTILINE), ended.output
    assert "loading the model" in (run.run_dir / "logs" / "policy-0.log").read_text()


def test_a_stopped_engine_counts_as_hung_and_is_replaced(folder: Path) -> None:
    with start_run(folder, LONG, "pool.hung_limit_s=1.5", num_ranks=0) as run:
        run.wait_for_step(1)
        stopped_pid = run.pid_of("policy-0")
        stopped = time.monotonic()
        os.kill(stopped_pid, signal.SIGSTOP)
        run.wait_for("its end", lambda: _is_gone(stopped_pid), timeout_s=30.0)
        assert time.monotonic() - stopped > 1.0
        run.wait_for_restart("policy-0")
        # The limit holds for its successors, too, so a busy machine may replace several.
        again = r"policy-0#([2-9]|\d{2,}) serves again"
        run.wait_for("news of it", lambda: _says(run, again), timeout_s=30.0)
        check_goes_on(run)

    assert _says(run, r"policy-0#1 was killed: it was stopped by a signal: "), run.output


def test_a_run_waits_for_a_stopped_rank_and_continues_with_it(folder: Path) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for_step(1)
        pid = run.pid_of("rank 1")
        os.kill(pid, signal.SIGSTOP)
        stopped = rf"rank 1 \(pid {pid}\) is stopped by a signal: kill -CONT {pid} lets it"
        run.wait_for("news of it", lambda: _says(run, stopped), timeout_s=30.0)
        time.sleep(SILENCE_LIMIT_S + 2.0)
        os.kill(pid, signal.SIGCONT)
        continues = rf"rank 1 \(pid {pid}\) continues, after \d+ s"
        run.wait_for("news of it", lambda: _says(run, continues), timeout_s=30.0)
        check_goes_on(run)


def test_a_killed_worker_comes_back_and_what_its_reward_forked_is_gone(folder: Path) -> None:
    pid_file = folder / "daemon-pid"
    reward = "reward.function=failing_rewards:leaves_a_daemon"
    environ = {"DAEMON_PID_FILE": str(pid_file)}

    with start_run(folder, LONG, reward, environ=environ, num_ranks=0) as run:
        run.wait_for_step(1)
        daemon = int(pid_file.read_text())
        os.kill(daemon, 0)  # it is there
        killed = run.pid_of("worker-0")
        os.kill(killed, signal.SIGKILL)
        run.wait_for("the daemon's end", lambda: _is_gone(daemon), timeout_s=30.0)
        run.wait_for_restart("worker-0")
        assert _is_gone(killed)
        check_goes_on(run)

    assert _says(run, rf"worker-0#1 \(pid {killed}\) {KILLED}"), run.output


def test_a_killed_child_of_a_reward_disturbs_nothing(folder: Path) -> None:
    pid_file = folder / "daemon-pid"
    reward = "reward.function=failing_rewards:leaves_a_daemon"
    environ = {"DAEMON_PID_FILE": str(pid_file)}

    with start_run(folder, LONG, reward, environ=environ, num_ranks=0) as run:
        run.wait_for_step(1)
        daemon = int(pid_file.read_text())
        os.kill(daemon, signal.SIGKILL)
        run.wait_for("the daemon's end", lambda: _has_ended(daemon), timeout_s=30.0)
        check_goes_on(run)
        incarnations = {actor["incarnation"] for actor in run.actors().values()}

    assert incarnations == {1}
    assert _is_gone(daemon)
    assert not _says(run, "restarting it"), run.output


def test_what_a_reward_forked_ends_with_the_run(folder: Path) -> None:
    pid_file = folder / "daemon-pid"
    reward = "reward.function=failing_rewards:leaves_a_daemon"
    environ = {"DAEMON_PID_FILE": str(pid_file)}

    with start_run(folder, reward, environ=environ, num_ranks=0) as run:
        ended = run.wait()

    assert ended.status == 0
    assert _is_gone(int(pid_file.read_text()))


def _says(run: Run, pattern: str) -> bool | None:
    return re.search(pattern, run.output, re.MULTILINE) is not None or None


def _is_gone(pid: int) -> bool | None:
    return not Path(f"/proc/{pid}").exists() or None


def _has_ended(pid: int) -> bool | None:
    """Whether a process is gone, or a zombie that its living parent has not reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z" or None
