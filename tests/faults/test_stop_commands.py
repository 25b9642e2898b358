"""`umbra stop` and `umbra preempt`: a running job ends in order, and another start continues it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from whole_runs import END_LIMIT_S, START_LIMIT_S, Run, start_run

from umbra.runtime.cluster.run_events import read_events
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

LONG = "train.steps=1000"


def umbra(
    *arguments: str | Path, prefix: Sequence[str | Path] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "umbra.runtime.cli.umbra_command", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def elsewhere(run: Run) -> Sequence[str | Path]:
    """Runs a command where the run directory is seen and the sockets are not, as in another
    container."""
    hide = f'mount -t tmpfs none {run.socket_root} && exec "$@"'
    may_mount = [] if os.getuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *may_mount, "sh", "-c", hide, "sh"]


def checkpoints(run: Run) -> list[str]:
    return sorted(path.parent.name for path in run.run_dir.glob("checkpoints/*/COMPLETE"))


def resume(folder: Path, run: Run, num_steps: int) -> None:
    """Checks that the next start does `num_steps` in all, each of them once."""
    with start_run(folder, f"train.steps={num_steps}", "run.resume=auto") as resumed:
        assert resumed.wait().status == 0
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "time/step_s" in row] == list(range(1, num_steps + 1))
    assert not (run.run_dir / "preempted").exists()


@pytest.mark.parametrize(
    ("kind", "status", "place"), [("stop", 143, "elsewhere"), ("preempt", 75, "on the node")]
)
def test_a_job_ends_with_a_checkpoint_and_resumes(
    folder: Path, kind: str, status: int, place: str
) -> None:
    with start_run(folder, LONG, "run.metrics_address=127.0.0.1:0") as run:
        run.wait_for_step(1)
        prefix = elsewhere(run) if place == "elsewhere" else ()
        dumped = umbra("dump", run.run_dir, prefix=prefix)
        done = umbra(kind, run.run_dir, prefix=prefix)
        ended = run.wait(END_LIMIT_S)

    assert dumped.returncode == 0, dumped.stderr
    assert "umbra dump asked for this bundle" in dumped.stdout
    assert "rank 1 (pid " in dumped.stdout
    assert done.returncode == 0, done.stderr
    assert ended.status == 1
    assert ended.output.count(f"exitcode  : {status}") == 2, ended.output
    assert (run.run_dir / "preempted").exists() == (kind == "preempt")
    num_steps = run.num_steps()
    assert checkpoints(run) == [f"step-{num_steps:06d}"]
    assert "metrics for Prometheus: http://127.0.0.1:" in ended.output
    events = [(event.kind, event.text) for event in read_events(run.run_dir)]
    assert events[0] == ("stop", f"umbra {kind} asked for it, within 300 s: all ranks stop")
    verb = "stopped" if kind == "stop" else "preempted"
    newest = run.run_dir / "checkpoints" / f"step-{num_steps:06d}"
    assert done.stdout == f"{run.run_dir}: {verb}; checkpoint: {newest}\n"
    saved = [text.partition(",")[0] for kind, text in events if kind == "checkpoint"]
    assert saved == [f"after step {num_steps}"]
    resume(folder, run, num_steps + 1)


@pytest.mark.parametrize(("kind", "fails"), [("stop", False), ("preempt", True)])
def test_torchrun_does_not_restart_a_job_that_was_stopped(
    folder: Path, kind: str, fails: bool
) -> None:
    """Neither in the midst of a run, nor if its ranks have just failed."""
    torchrun = ("--standalone", "--max-restarts", "3")
    with start_run(folder, LONG, "train.checkpoint_every=1", torchrun=torchrun) as run:
        run.wait_for_step(1)
        if fails:
            os.kill(run.pid_of("rank 1"), signal.SIGKILL)
        done = umbra(kind, run.run_dir)
        ended = run.wait(END_LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert ended.status == 1
    assert (run.run_dir / "preempted").exists() == (kind == "preempt")


def test_a_preemption_before_there_is_something_to_save_ends_the_ranks(folder: Path) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for(
            "the supervisor",
            lambda: (run.run_dir / "supervisor.json").exists() or None,
            timeout_s=START_LIMIT_S,
        )
        done = umbra("preempt", run.run_dir)
        ended = run.wait(END_LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run.run_dir}: preempted; there is no checkpoint yet\n"
    assert ended.status == 1
    assert (run.run_dir / "preempted").exists()
    assert run.num_steps() == 0
    resume(folder, run, 1)


def test_a_directory_without_a_running_job_is_reported(folder: Path) -> None:
    done = [umbra("stop", path) for path in (folder, folder / "none")]

    assert [one.returncode for one in done] == [1, 2]
    assert f"no job is running in {folder}" in done[0].stderr
    assert "there is no folder" in done[1].stderr


def test_a_killed_job_is_reported_and_its_request_does_not_stop_the_next_one(
    folder: Path,
) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for_step(1)
        run.kill_all(random.Random(0), at_once=True)
        done = umbra("preempt", run.run_dir)
        (run.run_dir / "request.json").write_text(
            json.dumps({"job": "another", "kind": "stop", "grace_s": 1.0})
        )

    assert done.returncode == 1
    assert "the job was killed" in done.stderr
    resume(folder, run, run.num_steps() + 2)


WAITING = "train.loss=odd_losses:waiting_loss"


def in_a_long_step(folder: Path, run: Run) -> None:
    run.wait_for("a step", lambda: (folder / "waiting").exists() or None, START_LIMIT_S)


def test_a_stop_waits_for_a_step_longer_than_the_grace_of_signals(folder: Path) -> None:
    with start_run(folder, LONG, WAITING, "train.shutdown_grace_s=1") as run:
        in_a_long_step(folder, run)
        with ThreadPoolExecutor() as threads:
            stopping = threads.submit(umbra, "stop", run.run_dir)
            time.sleep(3.0)
            (folder / "go_on").touch()
            done = stopping.result()
        run.wait(END_LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert checkpoints(run) == ["step-000001"]


def test_a_step_longer_than_the_time_given_is_cut(folder: Path) -> None:
    with start_run(folder, LONG, WAITING) as run:
        in_a_long_step(folder, run)
        done = umbra("preempt", run.run_dir, "--within", "1")
        ended = run.wait(END_LIMIT_S)

    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith(
        f"{run.run_dir}: preempted, but no checkpoint was written (there is none): rank "
    )
    cause = "StopNow: the step in progress did not end within 1 s of umbra preempt; step 1 is lost"
    assert cause in done.stdout
    assert ended.status == 1
    assert (run.run_dir / "preempted").exists()
    assert checkpoints(run) == []
