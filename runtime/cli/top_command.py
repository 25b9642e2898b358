"""`umbra top RUN_DIR`: shows what a run is doing, again each second, or once."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from umbra.runtime.cli.live_job import job_state, run_interruptibly
from umbra.runtime.cli.top_frame import RunSnapshot, frame
from umbra.runtime.cluster.run_events import read_events
from umbra.runtime.errors import ConfigError, DeadlineExceeded
from umbra.runtime.step_metrics import last_steps, total_steps

_INTERVAL_S: Final = 1.0
"""Interval of frames. Shorter costs the job's processes time and can hardly be read."""
_WIDTH: Final = 200
"""Line length without a terminal."""


def run(arguments: argparse.Namespace) -> int:
    """Shows frames until Ctrl-C, or, without a terminal, prints them until the job ends."""
    run_dir = Path(arguments.run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory: give a job's run.dir")
    if arguments.once or not sys.stdout.isatty():
        _print_frames(run_dir, once=arguments.once)
    else:
        with contextlib.suppress(KeyboardInterrupt), _whole_screen():
            while True:
                _draw(run_dir)
                time.sleep(_INTERVAL_S)
    return 0


def look(run_dir: Path) -> RunSnapshot:
    state, problem = None, ""
    try:
        state = run_interruptibly(job_state(run_dir))
    except DeadlineExceeded as error:
        problem = f"the supervisor does not answer ({error}); see umbra dump"
    return RunSnapshot(
        name=run_dir.absolute().name,  # a path could push the rest out of the line
        state=state,
        run_dir=str(run_dir),
        problem=problem,
        steps=last_steps(run_dir),
        total_steps=total_steps(run_dir),
        events=read_events(run_dir),
    )


def _print_frames(run_dir: Path, *, once: bool) -> None:
    while True:
        view = look(run_dir)
        print("\n".join(frame(view, time.time(), width=_WIDTH)), flush=True)
        if once or (view.state is None and not view.problem):
            return
        print()
        time.sleep(_INTERVAL_S)


@contextlib.contextmanager
def _whole_screen() -> Generator[None]:
    """The terminal's second screen, without a cursor, within the block."""
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def _draw(run_dir: Path) -> None:
    view = look(run_dir)
    size = shutil.get_terminal_size()
    lines = frame(view, time.time(), width=size.columns, height=size.lines)[: size.lines]
    # Overwritten in one write, because an empty screen in between would flicker.
    sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
    sys.stdout.flush()
