"""torchrun's elastic restarts: a lost rank costs the steps since the last checkpoint, no engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from whole_runs import start_run

from umbra.trainer.metrics import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_restart_by_torchrun_resumes_and_keeps_the_engines(folder: Path) -> None:
    settings = ("train.steps=4000", "train.checkpoint_every=2")

    with start_run(folder, *settings, torchrun=("--standalone", "--max-restarts", "1")) as run:
        run.wait_for_step(3)
        engine, supervisor = run.pid_of("policy-0"), run.pid_of("supervisor")
        os.kill(run.pid_of("rank 1"), signal.SIGKILL)
        lost_at = run.num_steps()
        run.wait_for_step(lost_at + 5)

        assert (run.pid_of("policy-0"), run.pid_of("supervisor")) == (engine, supervisor)
        os.kill(run.process.pid, signal.SIGTERM)
        ended = run.wait()

    steps = [int(row["step"]) for row in read_metrics(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, steps[-1] + 1))  # none missing, none twice
    assert f"stopped by SIGTERM after {steps[-1]} steps" in ended.output
