"""A run that hangs is explained by a bundle, which `umbra dump` or a missed deadline makes."""

from __future__ import annotations

import os
import re
import signal
import tarfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from whole_runs import END_LIMIT_S, Run, start_run

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.reports.hang_bundle import read_summary

pytestmark = [pytest.mark.process, pytest.mark.slow]

LONG = "train.steps=4000"


def dump(run: Run) -> str:
    """The summary of a bundle of the run, which continues."""
    assert main(["dump", str(run.run_dir)]) == 0
    return read_summary(newest_bundle(run))


def newest_bundle(run: Run) -> Path:
    return max((run.run_dir / "bundles").glob("*.tar"), key=lambda path: path.stat().st_mtime)


def part_about(name: str, summary: str) -> str:
    """The lines of one process."""
    (begin,) = re.finditer(rf"^{name} \(pid \d+\): ", summary, re.M)
    lines = summary[begin.start() :].splitlines()
    end = next(idx for idx, line in enumerate(lines) if idx and not line.startswith(" "))
    return "\n".join(lines[:end])


@contextmanager
def stopped(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_reward_that_never_returns_is_named_when_the_deadline_ends_the_run(folder: Path) -> None:
    settings = ["reward.function=failing_rewards:never_returns", "rollout.timeout_s=3"]

    with start_run(folder, LONG, *settings) as run:
        ended = run.wait()

    path = newest_bundle(run)
    summary = read_summary(path)
    place = r"never_returns \(.*/failing_rewards\.py:\d+\)"
    call = r"its oldest call began \d s ago"
    (cause,) = re.findall(rf"^worker-0 \(pid \d+\) is in {place}; {call}", summary, re.M)
    ended.check_failed("rollout.timeout_s = 3 s", cause)
    ended.check_failed(f"what all processes were doing is in {path}")
    assert "waits for worker-0#1" in summary
    with tarfile.open(path) as bundle:
        names = {Path(*Path(name).parts[1:]) for name in bundle.getnames()}
    assert Path("summary.txt") in names
    assert Path("node-0/logs/rollouts.log") in names
    assert any(name.match("node-0/stacks/rank-1-*.txt") for name in names)


def test_a_stopped_engine_and_a_stopped_supervisor_are_reported_and_left_alone(
    folder: Path,
) -> None:
    with start_run(folder, LONG, "pool.hung_limit_s=60", "pool.stall_limit_s=60") as run:
        run.wait_for_step(1)
        pid = run.pid_of("policy-0")
        with stopped(pid):
            summary = dump(run)
        run.wait_for_step(run.num_steps() + 3, timeout_s=END_LIMIT_S)
        assert run.pid_of("policy-0") == pid
        supervisor = run.pid_of("supervisor")
        with stopped(supervisor):
            from_outside = dump(run)
        run.wait_for_step(run.num_steps() + 3, timeout_s=END_LIMIT_S)
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait()

    assert f"policy-0 (pid {pid}): stopped by a signal" in summary
    assert "\npolicy-0#1: " in summary  # the state of the engine
    assert f"policy-0 (pid {pid}) is stopped by a signal: kill -CONT {pid} lets it" in summary
    assert "it did not answer within 3 s" in summary
    assert "_describe_calls" not in summary
    assert not re.search(r"^    serve \(.*/function_queue\.py", summary, re.M)  # it is idle
    assert "the supervisor does not answer" in from_outside
    assert f"supervisor (pid {supervisor}): stopped by a signal" in from_outside
    assert "umbra.trainer" in from_outside  # a rank's command line
    assert "rollouts#1" in from_outside


def test_a_rank_in_a_dead_collective_and_the_rank_that_it_waits_for_are_shown(
    folder: Path,
) -> None:
    with start_run(folder, LONG, "train.loss=odd_losses:waits_on_rank_1") as run:
        run.wait_for("the wait", lambda: (folder / "waiting").exists() or None, timeout_s=60.0)
        summary = dump(run)
        (folder / "go_on").touch()
        run.wait_for_step(1)
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait()

    assert "waiting_loss (" in part_about("rank 1", summary)
    assert "torch/distributed" in part_about("rank 0", summary)
    assert "waiting_loss" not in part_about("rank 0", summary)
    place = r"waiting_loss \(.*/odd_losses\.py:\d+\)"
    assert re.search(rf"^rank 1 \(pid \d+\) is in {place}\nrank 0 waits in a coll", summary, re.M)
