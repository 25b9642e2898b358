"""SIGINT and SIGTERM: everything ends within 5 s, and no completed work is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from whole_runs import Ended, Run, start_run

from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.alone]

LIMIT_S = 5.0
LONG = "train.steps=1000"


def stop(run: Run, number: signal.Signals, *names: str) -> Ended:
    """Sends a signal to these processes and waits for the end of the run."""
    pids = [run.pid_of(name) for name in names]
    sent = time.monotonic()
    for pid in pids:
        os.kill(pid, number)
    ended = run.wait()
    assert ended.gone_at - sent < LIMIT_S, ended.output
    assert ended.status != 0
    return ended


def checkpoints(run: Run) -> list[str]:
    return sorted(path.parent.name for path in run.run_dir.glob("checkpoints/*/COMPLETE"))


def test_sigterm_to_torchrun_leaves_a_checkpoint_from_which_the_run_resumes(folder: Path) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for_step(2)
        ended = stop(run, signal.SIGTERM, "torchrun")
    num_steps = run.num_steps()

    assert f"stopped by SIGTERM after {num_steps} steps" in ended.output
    assert checkpoints(run) == [f"step-{num_steps:06d}"]

    with start_run(folder, f"train.steps={num_steps + 1}", "run.resume=auto") as resumed:
        assert resumed.wait().status == 0

    rows = read_metrics(run.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, num_steps + 2))
    assert checkpoints(run)[-1] == f"step-{num_steps + 1:06d}"


LAUNCHED = ("torchrun", "rank 0", "rank 1", "guardian", "supervisor")
ACTORS = ("rollouts", "worker-0", "policy-0")


@pytest.mark.parametrize(
    ("number", "names", "others"),
    [
        (signal.SIGINT, (*LAUNCHED, *ACTORS), ()),
        (signal.SIGTERM, ACTORS, LAUNCHED),
        (signal.SIGTERM, ("supervisor",), ()),
    ],
    ids=["all at once", "actors first", "supervisor"],
)
def test_a_signal_is_one_stop_whichever_processes_it_reaches(
    folder: Path, number: signal.Signals, names: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """`others` get the signal half a second later."""
    with start_run(folder, LONG) as run:
        run.wait_for_step(1)
        pids = [run.pid_of(name) for name in others]
        late = threading.Timer(0.5, lambda: [os.kill(pid, number) for pid in pids])
        late.start()
        ended = stop(run, number, *names)
        late.join()

    num_steps = run.num_steps()
    assert f"stopped by {number.name} after {num_steps} steps" in ended.output
    assert [ended.error_of(rank) for rank in (0, 1)] == ["", ""], ended.output
    assert "restarting" not in ended.output
    assert ended.output.count("exitcode  : 143") == 2 or "torchrun" in names + others
    assert checkpoints(run) == [f"step-{num_steps:06d}"]
    assert "failed" not in (run.run_dir / "logs" / "supervisor.log").read_text()


def test_sigint_in_the_middle_of_the_first_step_ends_it(folder: Path) -> None:
    slow = "pool.engine_args={vocab_size=42, tokens_per_s=0.01}"

    with start_run(folder, LONG, slow) as run:
        run.wait_for("the first sync", lambda: _has_synced(run), timeout_s=90.0)
        ended = stop(run, signal.SIGINT, "torchrun")

    assert "stopped by SIGINT after 0 steps" in ended.output
    assert checkpoints(run) == []


def test_sigterm_while_processes_start_ends_them(folder: Path) -> None:
    with start_run(folder, LONG) as run:
        run.wait_for("the first actor", lambda: run.actors() or None, timeout_s=60.0)
        ended = stop(run, signal.SIGTERM, "torchrun")

    assert run.num_steps() == 0
    assert "  stopped by SIGTERM before the first step; nothing was saved\n" in ended.output


@pytest.mark.parametrize("name", ["torchrun", "rank 1"])
def test_sigterm_while_ranks_compile_before_the_engines_serve_ends_them(
    folder: Path, name: str
) -> None:
    settings = ("train.compile=true", "pool.sleep=none")
    held = {"HELD": "1"}
    with start_run(folder, *settings, program="compiling_trainer", environ=held) as run:
        compiling = folder / "compiling"
        run.wait_for("a compiler", lambda: compiling.exists() or None, timeout_s=90.0)
        ended = stop(run, signal.SIGTERM, name)

    assert run.num_steps() == 0
    if name == "torchrun":
        assert "  stopped by SIGTERM before the first step; nothing was saved\n" in ended.output


def _has_synced(run: Run) -> bool | None:
    log = run.run_dir / "logs" / "supervisor.log"
    return (log.exists() and "version 1 is on policy-0" in log.read_text()) or None
