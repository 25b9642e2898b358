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
from umbra.trainer.reporting.metrics_loggers import read_metrics

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


def test_what_a_reward_forked_goes_with_its_worker_and_its_end_alone_disturbs_nothing(
    folder: Path,
) -> None:
    pid_file = folder / "daemon-pid"

    def daemon_of_the_next_reward(run: Run) -> int:
        pid_file.unlink(missing_ok=True)
        run.wait_for("a daemon", lambda: (pid_file.exists() and pid_file.read_text()) or None, 90.0)
        daemon = int(pid_file.read_text())
        os.kill(daemon, 0)  # it is there
        return daemon

    reward = "reward.function=failing_rewards:leaves_a_daemon"
    environ = {"DAEMON_PID_FILE": str(pid_file)}
    with start_run(folder, LONG, reward, environ=environ, num_ranks=0) as run:
        daemon = daemon_of_the_next_reward(run)
        os.kill(daemon, signal.SIGKILL)
        run.wait_for("the daemon's end", lambda: _has_ended(daemon), timeout_s=30.0)
        run.wait_for_step(run.num_steps() + 3, timeout_s=30.0)
        assert {actor["incarnation"] for actor in run.actors().values()} == {1}

        daemon, killed = daemon_of_the_next_reward(run), run.pid_of("worker-0")
        os.kill(killed, signal.SIGKILL)
        run.wait_for("the daemon's end", lambda: _is_gone(daemon), timeout_s=30.0)
        run.wait_for_restart("worker-0")
        assert _is_gone(killed)

        daemon = daemon_of_the_next_reward(run)
        check_goes_on(run)

    assert _is_gone(daemon)
    assert _says(run, rf"worker-0#1 \(pid {killed}\) {KILLED}"), run.output


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


def test_a_restart_by_torchrun_resumes_and_keeps_the_engines(folder: Path, assets: Path) -> None:
    """Also those of a judge."""
    settings = [
        "train.steps=4000",
        "train.checkpoint_every=2",
        f"pools.judge.model_path={assets / 'model'}",
        "reward.function=plain_rewards:distinct_by_judge",
    ]
    engines = ["policy-0", "judge-0", "supervisor"]

    with start_run(folder, *settings, torchrun=("--standalone", "--max-restarts", "1")) as run:
        run.wait_for_step(3)
        before = [run.pid_of(name) for name in engines]
        os.kill(run.pid_of("rank 1"), signal.SIGKILL)
        lost_at = run.num_steps()
        run.wait_for_step(lost_at + 5)

        assert [run.pid_of(name) for name in engines] == before
        os.kill(run.process.pid, signal.SIGTERM)
        ended = run.wait()

    steps = [int(row["step"]) for row in read_metrics(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, steps[-1] + 1))  # none missing, none twice
    assert f"stopped by SIGTERM after {steps[-1]} steps" in ended.output
