"""Picks an engine of a running training and kills it in the middle of generating."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.errors import UmbraError
from umbra.trainer.reporting.metrics_log import read_metrics

Found = TypeVar("Found")

_POLL_S: Final = 0.02
"""Interval of reading a file or /proc, whose changes cannot be awaited."""

_BUSY_SHARE: Final = 0.3
"""Share of the time. An engine whose threads run or are ready to for more of it is generating or
loading weights; those of one that sleeps are not."""

_BUSY_WITHIN_S: Final = 60.0
_STEPS_WITHIN_S: Final = 300.0
_LOOK_S: Final = 0.01
"""How long an engine is watched for that. Longer misses short generations. Shorter than the
scheduler's tick (1 to 10 ms) would miss processor time that has not been counted yet."""

_LATEST_IN_GENERATION: Final = 0.4
"""Share of a generation's duration. Later, the engine might finish just before the kill."""


class DrillError(UmbraError):
    """The drill could not be carried out; the message has what it waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """An engine that was killed.

    Attributes:
        engine: its name.
        step: the training step during which it was killed.
        log_offset: length of the supervisor's log in bytes at the kill.
    """

    engine: str
    pid: int
    step: int
    log_offset: int


def kill_an_engine(
    training: subprocess.Popen[bytes], run_dir: Path, after_step: int, rng: random.Random
) -> Kill:
    """Waits until `after_step` steps are done, then sends SIGKILL to an engine that generates.

    Raises:
        DrillError: training ended or took too long, or no engine generated.
    """

    def look() -> dict[str, float] | None:
        if training.poll() is not None:
            raise DrillError(f"training ended before step {after_step}: {training.returncode}")
        return _row_of(run_dir, after_step)

    done = _wait_for(f"step {after_step}", look, _STEPS_WITHIN_S)
    engine, pid = rng.choice(sorted(_engines(run_dir).items()))
    latest_s = _LATEST_IN_GENERATION * done.get("time/rollout_s", 0.0)
    _wait_for(
        f"{engine} (pid {pid}) to generate",
        lambda: _is_busy_for(pid, rng.uniform(0.0, latest_s)) or None,
        timeout_s=_BUSY_WITHIN_S,
    )
    log_offset = supervisor_log(run_dir).stat().st_size
    os.kill(pid, signal.SIGKILL)
    num_done = int(read_metrics(run_dir / "metrics.jsonl")[-1]["step"])
    return Kill(engine=engine, pid=pid, step=num_done + 1, log_offset=log_offset)


def lines_about(run_dir: Path, kill: Kill) -> list[str]:
    """The supervisor's log lines about the engine (NAME#INCARNATION) since its death."""
    with supervisor_log(run_dir).open("rb") as log:
        log.seek(kill.log_offset)
        lines = log.read().decode(errors="replace").splitlines()
    return [line for line in lines if f"{kill.engine}#" in line]


def supervisor_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "supervisor.log"


def _wait_for(what: str, look: Callable[[], Found | None], timeout_s: float) -> Found:
    """The first value of `look` that is not None.

    Raises:
        DrillError: there was none in time.
    """
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise DrillError(f"waited {timeout_s:g} s for {what}")
        time.sleep(_POLL_S)
    return found


def _row_of(run_dir: Path, step: int) -> dict[str, float] | None:
    rows = read_metrics(run_dir / "metrics.jsonl")
    return rows[-1] if rows and rows[-1]["step"] >= step else None


def _engines(run_dir: Path) -> dict[str, int]:
    """Pids of the running engines."""
    processes: dict[str, dict[str, Any]] = json.loads((run_dir / "processes.json").read_text())
    return {
        name: process["pid"]
        for name, process in processes.items()
        if process["role"] == "engine" and process["state"] == ActorState.RUNNING
    }


def _is_busy_for(pid: int, duration_s: float) -> bool:
    """Whether the process is busy now and still is after `duration_s`."""
    if not _is_busy(pid):
        return False
    time.sleep(duration_s)
    return _is_busy(pid)


def _is_busy(pid: int) -> bool:
    started, before_s = time.monotonic(), _active_s(pid)
    time.sleep(_LOOK_S)
    return _active_s(pid) - before_s > _BUSY_SHARE * (time.monotonic() - started)


def _active_s(pid: int) -> float:
    """Time so far in which threads ran, or waited for a core of a busy machine. Summed over all
    threads, to the nanosecond.

    Source: /proc/PID/schedstat in Linux, Documentation/scheduler/sched-stats.rst.
    """
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            run, waited, _ = (thread / "schedstat").read_text().split()
            total_ns += int(run) + int(waited)
    return total_ns / 1e9
