"""Ctrl-C in a terminal: the first one waits for the step, the second one does not."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_traces import environment_of
from whole_runs import END_LIMIT_S, START_LIMIT_S, Run, Terminal, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]

LAST_RESORT_S = 2.0
LONG = "train.steps=1000"


@contextmanager
def held_in_a_step(folder: Path, *, is_forked: bool) -> Generator[tuple[Run, Terminal]]:
    """A run in a terminal whose third or a later step does not end while folder/held exists.

    A fork of a process that has imported torch has not loaded umbra's plugin for torchrun.
    """
    settings = (LONG, "train.loss=odd_losses:held_loss", "train.shutdown_grace_s=0.2")
    with (
        Terminal(folder / "shown.txt") as terminal,
        start_run(
            folder,
            *settings,
            num_ranks=1,
            terminal=terminal,
            environ={"TERM": "dumb"},
            is_forked=is_forked,
        ) as run,
    ):
        run.wait_for_step(2, 2 * START_LIMIT_S)
        (folder / "held").touch()
        run.wait_for("the step", lambda: (folder / "waiting").exists() or None, START_LIMIT_S)
        yield run, terminal


def wait_for_text(run: Run, folder: Path, pattern: str) -> None:
    shown = folder / "shown.txt"
    run.wait_for(pattern, lambda: re.search(pattern, shown.read_text()), END_LIMIT_S)


def test_ctrl_c_waits_for_the_step_and_its_checkpoint_and_says_when_they_end(folder: Path) -> None:
    with held_in_a_step(folder, is_forked=False) as (run, terminal):
        # torchrun would kill ranks that end later.
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT="
        found = [each for each in environment_of(run.pid_of("rank 0")) if each.startswith(name)]
        assert found, "umbra was installed without its entry point for torchrun: install it again"
        assert int(found[0].removeprefix(name)) >= 24 * 3600
        terminal.press_ctrl_c()
        num_steps = run.num_steps() + 1
        wait_for_text(run, folder, rf"SIGINT: step {num_steps} ends in about \d+ s; then a check")
        time.sleep(LAST_RESORT_S + 1.0)  # more than a stop by SIGTERM gets
        (folder / "held").unlink()
        ended = run.wait(END_LIMIT_S)

    shown = (folder / "shown.txt").read_text()
    assert run.num_steps() == num_steps
    assert f"stopped by SIGINT after {num_steps} steps" in shown
    assert (run.run_dir / f"checkpoints/step-{num_steps:06d}/COMPLETE").exists()
    assert ended.status != 0
    assert "Traceback" not in shown
    assert "torchrun: ended by a stop" in shown.splitlines()[-1]


def test_a_second_ctrl_c_ends_the_run_at_once_and_says_what_is_lost(folder: Path) -> None:
    with held_in_a_step(folder, is_forked=True) as (run, terminal):
        terminal.press_ctrl_c()
        wait_for_text(run, folder, "SIGINT: step")
        time.sleep(1.1)  # signals that are closer together are one request
        terminal.press_ctrl_c()
        ended = run.wait(END_LIMIT_S)

    shown = (folder / "shown.txt").read_text()
    lost = f"steps 1 to {run.num_steps() + 1} are lost; there is no checkpoint"
    assert "a second signal came before the step in progress had ended; " + lost in shown
    assert ended.status != 0
    assert not list(run.run_dir.glob("checkpoints/*/COMPLETE"))
