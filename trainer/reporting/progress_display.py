"""Shows training progress: one line per step, and a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self, TextIO

from umbra.runtime.durations import format_duration

# Recent steps whose mean duration predicts the remaining time. Fewer make the prediction jump, more
# make it lag behind changes.
_ETA_WINDOW: Final = 20


class Progress:
    """Prints progress on rank 0. `note` is thread-safe. A context manager."""

    def __init__(
        self, name: str, total_steps: int, first_step: int, stream: TextIO | None = None
    ) -> None:
        self._name = name
        self._total = total_steps
        self._done = first_step
        self._stream = stream or sys.stderr
        self._marks: deque[float] = deque([time.monotonic()], maxlen=_ETA_WINDOW + 1)
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = _make_bar(self._stream)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total, completed=self._done)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step_done(self, step: int, row: Mapping[str, float]) -> None:
        """Prints the metrics of step `step` (from 1)."""
        self._done = step
        self._marks.append(time.monotonic())
        line = format_step(step, self._total, row, self.eta_s)
        self._print(line)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """Prints an event between steps: an evaluation, an engine that died or came back."""
        self._print(f"  {text}")

    @property
    def eta_s(self) -> float:
        """Seconds until the last step, from the pace of recent ones."""
        num_steps = len(self._marks) - 1
        if num_steps < 1:
            return 0.0
        pace_s = (self._marks[-1] - self._marks[0]) / num_steps
        return pace_s * (self._total - self._done)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=True, markup=False, soft_wrap=True)
        else:
            # One write: ranks share stderr, and print() may write the line's end apart.
            self._stream.write(f"{line}\n")
            self._stream.flush()


def format_step(step: int, total: int, row: Mapping[str, float], eta_s: float) -> str:
    """One line of fixed columns, such as
    `step   12/100  reward 0.431  17.2k tok/s  gen 0.35s  sync 0.02s  train 0.18s  eta 0:52`.
    """
    width = len(str(total))
    return (
        f"step {step:>{width}}/{total}  reward {row['rollout/reward_mean']:.3f}  "
        f"{row['rollout/tokens_per_s'] / 1000:.1f}k tok/s  gen {row['time/rollout_s']:.2f}s  "
        f"sync {row['time/sync_s']:.2f}s  train {row['time/train_s']:.2f}s  "
        f"eta {format_duration(eta_s)}"
    )


def _make_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Bar(*columns, console=Console(file=stream), transient=True)
