"""Processes that a run can do without for a moment: they come back, and training goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from runs import Run, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 4000
LONG = f"train.steps={STEPS}"


def check_goes_on(run: Run) -> None:
    """Asserts that further steps follow; then the run is ended in good order."""
    run.wait_for_step(run.num_steps() + 3, timeout_s=30.0)
    os.kill(run.process.pid, signal.SIGTERM)
    ended = run.wait()
    assert f"stopped by SIGTERM after {run.num_steps()} steps" in ended.output
    assert "JobFailed" not in ended.output


def test_a_killed_engine_comes_back(folder: Path) -> None:
    settings = ["pool.engine=embedded", "pool.engine_args={}", "pool.count=2"]

    with start_run(folder, LONG, *settings) as run:
        run.wait_for_step(1)
        os.kill(run.pid_of("policy-1"), signal.SIGKILL)
        run.wait_for_restart("policy-1")
        run.wait_for("news of it", lambda: _says(run, "policy-1#2 serves again"), timeout_s=30.0)
        check_goes_on(run)

    assert "policy-1#1" in run.output


def test_a_stopped_engine_counts_as_hung_and_is_replaced(folder: Path) -> None:
    with start_run(folder, LONG, "pool.hung_limit_s=1.5") as run:
        run.wait_for_step(1)
        stopped = time.monotonic()
        os.kill(run.pid_of("policy-0"), signal.SIGSTOP)
        run.wait_for_restart("policy-0")
        assert 1.0 < time.monotonic() - stopped < 10.0
        check_goes_on(run)

    assert "policy-0#1 was killed: no heartbeat for" in run.output
    assert "policy-0#2 serves again" in run.output


def test_a_killed_worker_comes_back_and_what_its_reward_forked_is_gone(folder: Path) -> None:
    pid_file = folder / "daemon-pid"
    reward = "reward.function=failing_rewards:leaves_a_daemon"
    environ = {"DAEMON_PID_FILE": str(pid_file)}

    with start_run(folder, LONG, reward, environ=environ) as run:
        run.wait_for_step(1)
        daemon = int(pid_file.read_text())
        os.kill(daemon, 0)  # it is there
        os.kill(run.pid_of("worker-0"), signal.SIGKILL)
        run.wait_for("the daemon's end", lambda: _is_gone(daemon), timeout_s=5.0)
        run.wait_for_restart("worker-0")
        check_goes_on(run)

    assert "killed by SIGKILL (9); restarting it" in run.output


def test_what_a_reward_forked_ends_with_the_run(folder: Path) -> None:
    pid_file = folder / "daemon-pid"
    reward = "reward.function=failing_rewards:leaves_a_daemon"
    environ = {"DAEMON_PID_FILE": str(pid_file)}

    with start_run(folder, reward, environ=environ, num_ranks=0) as run:
        ended = run.wait()

    assert ended.status == 0
    assert _is_gone(int(pid_file.read_text()))


def _says(run: Run, words: str) -> bool | None:
    return words in run.output or None


def _is_gone(pid: int) -> bool | None:
    return not Path(f"/proc/{pid}").exists() or None
