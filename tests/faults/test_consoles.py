"""A terminal that is closed stops the run with a checkpoint, but after nohup the run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import START_LIMIT_S, Run, Terminal, start_run

from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]


def check_finished(run: Run, steps: int, *, names_loss: bool) -> None:
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert (run.run_dir / f"checkpoints/step-{steps:06d}/COMPLETE").exists()
    assert (run.run_dir / "export/config.json").exists()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_by"]) == (steps, "")
    log = (run.run_dir / "logs/supervisor.log").read_text()
    assert log.count("rank 0: stderr cannot be written") == names_loss


def check_hung_up(run: Run) -> None:
    """Asserts that the run has ended as by SIGTERM."""
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_by"]) == (run.num_steps(), "SIGHUP")
    complete = [path.parent.name for path in run.run_dir.glob("checkpoints/*/COMPLETE")]
    assert complete == [f"step-{run.num_steps():06d}"]


def test_a_closed_terminal_stops_the_run_with_a_checkpoint(folder: Path) -> None:
    with (
        Terminal() as terminal,
        start_run(folder, "train.steps=1000", num_ranks=2, terminal=terminal) as run,
    ):
        run.wait_for_step(2)
        terminal.close_window()
        ended = run.wait()

    assert ended.status != 0
    check_hung_up(run)


def test_after_nohup_a_run_outlives_its_terminal(folder: Path) -> None:
    with (
        Terminal() as terminal,
        start_run(
            folder,
            "train.steps=30",
            "train.export=true",
            prefix=["nohup"],
            is_forked=False,
            terminal=terminal,
        ) as run,
    ):
        run.wait_for_step(2)
        terminal.close_window()
        ended = run.wait(START_LIMIT_S)

    assert ended.status == 0, (folder / "nohup.out").read_text()
    check_finished(run, 30, names_loss=False)
