"""torchrun's elastic restarts: a lost rank costs the steps since the last checkpoint, no engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from whole_runs import start_run

from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]


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
