"""One training run during which one engine is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drill_victim import Kill, kill_an_engine, lines_about, supervisor_log
from run_traces import RunTraces

from umbra.trainer.config.config_file import load_config

_NUM_RANKS: Final = 2
_END_TIMEOUT_S: Final = 300.0
_STOP_GRACE_S: Final = 15.0
_GRACE_S: Final = 5.0
"""Time from the end of torchrun to the end of all other processes."""

_KILL_BETWEEN: Final = (0.1, 0.4)
"""Shares of the run. Later, the run might end before the engine's successor serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrilledRun:
    """The result of a run.

    Attributes:
        summary: its summary.json.
        log_lines: the supervisor's log lines about the killed engine.
        leftovers: one line for each process, folder or name of shared memory left behind.
    """

    name: str
    kill: Kill
    summary: dict[str, Any]
    log_lines: list[str]
    leftovers: list[str]

    def problems(self, bar: float) -> list[str]:
        """The failed checks; empty if the drill was passed."""
        accuracy, restarts = self.summary["accuracy_after"], self.summary["engine_restarts"]
        found = [f"left behind: {leftover}" for leftover in self.leftovers]
        if accuracy is None or accuracy < bar:
            found.append(f"accuracy at the end is {accuracy}, expected at least {bar}")
        if restarts < 1:
            found.append("no engine was restarted, although one was killed")
        for event in ("killed by SIGKILL", "serves again"):
            if not any(event in line for line in self.log_lines):
                found.append(f"the supervisor's log has no line {event!r} on {self.kill.engine}")
        return [f"{self.name}: {problem}" for problem in found]


def run_drilled(
    name: str, config_path: Path, overrides: Sequence[str], run_dir: Path, rng: random.Random
) -> DrilledRun:
    """Trains in `run_dir`, kills an engine during the run and waits for the end.

    Raises:
        DrillError: no engine could be killed.
        subprocess.CalledProcessError, subprocess.TimeoutExpired: it failed or did not end.
    """
    arguments = [*overrides, f"run.dir={run_dir}", "run.overwrite=true"]
    steps = load_config(config_path, arguments).train.steps
    assert steps is not None, "the drill's config counts steps, not epochs"
    after_step = max(1, round(rng.uniform(*_KILL_BETWEEN) * steps))
    for stale in ("metrics.jsonl", "processes.json", "summary.json"):
        (run_dir / stale).unlink(missing_ok=True)
    supervisor_log(run_dir).unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(_NUM_RANKS), "-m", "umbra.trainer", str(config_path)]
    with RunTraces() as traces:
        with _running([*command, *arguments], traces) as torchrun:
            kill = kill_an_engine(torchrun, run_dir, after_step, rng)
            victim = f"{kill.engine} (pid {kill.pid})"
            print(f"drill: killed {victim} while step {kill.step} was generated")
            exit_status = torchrun.wait(_END_TIMEOUT_S)
        if exit_status != 0:
            raise subprocess.CalledProcessError(exit_status, torchrun.args)
        leftovers = traces.find(_GRACE_S)
    return DrilledRun(
        name=name,
        kill=kill,
        summary=json.loads((run_dir / "summary.json").read_text()),
        log_lines=lines_about(run_dir, kill),
        leftovers=leftovers,
    )


@contextlib.contextmanager
def _running(command: Sequence[str], traces: RunTraces) -> Generator[subprocess.Popen[bytes]]:
    """Runs a process in the block, and ends it afterwards: by SIGTERM, then by SIGKILL."""
    with subprocess.Popen(command, env={**os.environ, **traces.environment}) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
