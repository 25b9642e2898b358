"""Standard streams whose failure does not end the process, and a run's progress on them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TextIO, cast

from umbra.runtime.errors import UmbraError
from umbra.runtime.terminal_text import escape_unprintable, format_duration

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES: Final = {1: "stdout", 2: "stderr"}  # by descriptor

_TICK_S: Final = 1.0
"""Between two looks at what is in progress. Shorter repeats calls to other processes for nothing;
with a longer one a bar seems to stand still."""
_SHOWN_AFTER_S: Final = 1.0
"""On a terminal. Shorter activities would only flicker."""
_REPORTED_AFTER_S: Final = 5.0
"""An activity that took so long leaves a line. With less, each start has lines that nobody needs;
with more, nobody sees what made it slow."""
_QUIET_S: Final = 5.0
"""Without a line elsewhere, before steps are done. It doubles with each line about what is in
progress, so that an hour of waiting is a dozen lines."""
_QUIET_STEPS: Final = 3.0
"""The same once steps are done, in durations of the last step, and at least `_LEAST_QUIET_S`."""
_LEAST_QUIET_S: Final = 60.0
_BAR_WIDTH: Final = 30  # characters

Count = tuple[int, int] | tuple[int, int, str]
"""How many are done, of how many, and what the others wait for."""


class Console:
    """The standard streams of this process, whose failure does not end it. Use `install`.

    Writes fail where a reader has died (`| tee`, `| head`), a terminal was closed or a disk is
    full. Text that cannot be written is dropped: a run keeps its results in its run directory.
    """

    def __init__(self) -> None:
        self._log: Path | None = None
        self._name = ""
        self._files = [_LossyFile(descriptor, self._report) for descriptor in _NAMES]

    @classmethod
    def install(cls) -> Self:
        """Replaces `sys.stdout` and `sys.stderr` by streams that never raise OSError. Entry points
        call it before anything is opened: closed descriptors (`>&-`) become /dev/null. Otherwise
        the first file to be opened would get such a descriptor, and all output."""
        _fill_closed_descriptors()
        console = cls()
        sys.stdout, sys.stderr = (
            _open_text(file, former)
            for file, former in zip(console._files, (sys.stdout, sys.stderr), strict=True)
        )
        return console

    def log_losses(self, path: Path, name: str) -> None:
        """Logs the first failed write of each stream to a file, also one before this call. `name`
        names this process in the line."""
        self._name = name
        self._log = path
        for file in self._files:
            if file.failure:
                self._report(file)

    def _report(self, file: _LossyFile) -> None:
        if self._log is None:
            return
        line = (
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._name}: {_NAMES[file.fileno()]} cannot be "
            f"written ({file.failure}): its text is dropped, and nothing else is affected\n"
        )
        # The disk may be full, and there is no other place to report it.
        with contextlib.suppress(OSError), self._log.open("ab", buffering=0) as log:
            log.write(line.encode())


class _LossyFile(io.FileIO):
    """A standard descriptor. `write` returns as if text that could not be written had been;
    `failure` has the cause of the first failed write, or ""."""

    def __init__(self, descriptor: int, on_failure: Callable[[_LossyFile], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failure = ""
        self._on_failure = on_failure

    def write(self, data: ReadableBuffer, /) -> int:
        num_bytes = memoryview(data).nbytes
        try:
            # None: another process made it non-blocking, and its reader is slow.
            return super().write(data) or num_bytes
        except OSError as error:
            if not self.failure:
                self.failure = error.strerror or str(error)
                self._on_failure(self)
        return num_bytes


def _fill_closed_descriptors() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= max(_NAMES):
        os.set_inheritable(descriptor, True)  # like all standard descriptors
    os.close(descriptor)


def _open_text(file: _LossyFile, former: TextIO | None) -> TextIO:
    """Opens a line-buffered stream, even if Python runs unbuffered (-u), as under torchrun."""
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=former.encoding if former is not None else "utf-8",
        errors=former.errors if former is not None else "backslashreplace",
        line_buffering=True,
    )


@dataclass(eq=False)
class Activity:
    """Something in progress, which may set its count.

    note, step_done ──▶ a line
    activity        ──▶ on a terminal, a row below the lines, with a bar where it counts something;
                        elsewhere, a line when nothing was shown for a while, then ever less often
    """

    text: str
    unit: str
    began_at: float
    # Returns the count of another process; None if it does not know.
    ask: Callable[[], Count | None] = lambda: None
    num_done: int | None = None  # None if nothing is counted
    total: int | None = None  # None if unknown
    waits: str = ""  # what for, where `ask` knows it

    def count(self) -> None:
        self.num_done = (self.num_done or 0) + 1

    @property
    def amount(self) -> str:
        """`12 of 64 prompts, 52 wait for the reward function`; "" if nothing is counted."""
        if self.num_done is None:
            return ""
        total = "" if self.total is None else f" of {self.total:,}"
        counted = f"{self.num_done:,}{total} {self.unit}".rstrip()
        return ", ".join(filter(None, (counted, self.waits)))


class ProgressDisplay:
    """Shows progress on `stream`; None shows nothing, as on all ranks but 0. Thread-safe. A
    context manager."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.RLock()
        self._activities: list[Activity] = []
        self._rows: _Rows | None = None
        if stream is not None and stream.isatty():
            self._rows = _Rows(stream)
        self._steps: Activity | None = None
        self._quiet_s = self._least_quiet_s = _QUIET_S
        self._shown_at = clock()
        self._is_closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="umbra-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._stream is not None:
            self._ticker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closed.set()
        with self._lock:
            if self._rows is not None:
                self._rows.close()
            self._stream = None

    def note(self, text: str) -> None:
        """Shows an event: an evaluation, an engine that died or came back."""
        with self._lock:
            self._print(f"{self._indent}{escape_unprintable(text)}")
            self._quiet_s = self._least_quiet_s

    @contextlib.contextmanager
    def activity(
        self, text: str, *, unit: str = "", ask: Callable[[], Count | None] = lambda: None
    ) -> Generator[Activity]:
        """Shows `text` while the block runs. `ask` is called in the display's thread; its
        UmbraErrors are ignored."""
        activity = Activity(text, unit, self._clock(), ask)
        with self._lock:
            self._activities.append(activity)
        try:
            yield activity
        finally:
            took_s = self._age_s(activity)
            with self._lock:
                self._activities.remove(activity)
                if took_s >= _SHOWN_AFTER_S:
                    self._draw()
        if took_s >= max(_REPORTED_AFTER_S, self._least_quiet_s):
            self.note(f"{text} took {format_duration(took_s)}")

    def begin_steps(self, name: str, done: int, total: int) -> None:
        """From here on other lines are indented, because they are between those of steps."""
        with self._lock:
            self._steps = Activity(name, "steps", self._clock(), num_done=done, total=total)

    def step_done(self, step: int, row: Mapping[str, float]) -> None:
        """Shows the metrics of step `step` (from 1), after `begin_steps`."""
        with self._lock:
            assert self._steps is not None
            total = self._steps.total or step
            self._steps.num_done = step
            self._least_quiet_s = max(_LEAST_QUIET_S, _QUIET_STEPS * row["time/step_s"])
            self._quiet_s = self._least_quiet_s
            self._print(format_step(step, total, row))
            self._draw()

    def refresh(self) -> None:
        with self._lock:
            is_due = self._rows is not None or self._clock() - self._shown_at >= self._quiet_s
            shown = [each for each in self._activities if self._age_s(each) >= _SHOWN_AFTER_S]
        if not is_due:
            return
        for activity in shown:  # outside the lock, because another process answers
            with contextlib.suppress(UmbraError):
                if count := activity.ask():
                    activity.num_done, activity.total, *waits = count
                    activity.waits = "".join(waits)
        with self._lock:
            self._draw()
            shown = [each for each in shown if each in self._activities]
            if self._rows is None and shown:
                self._print(self._indent + "; ".join(map(self._describe, shown)))
                self._quiet_s *= 2

    def _tick(self) -> None:
        while not self._is_closed.wait(_TICK_S):
            self.refresh()

    @property
    def _indent(self) -> str:
        return "" if self._steps is None else "  "

    def _age_s(self, activity: Activity) -> float:
        return self._clock() - activity.began_at

    def _describe(self, activity: Activity) -> str:
        parts = [activity.amount, f"for {format_duration(self._age_s(activity))}"]
        return f"{activity.text}: {', '.join(filter(None, parts))}"

    def _draw(self) -> None:
        if self._rows is None or self._stream is None:
            return
        shown = [each for each in self._activities if self._age_s(each) >= _SHOWN_AFTER_S]
        self._rows.draw([self._steps, *shown] if self._steps else shown, self._clock())

    def _print(self, line: str) -> None:
        self._shown_at = self._clock()
        if self._rows is not None and self._stream is not None:
            self._rows.print(line)
        elif self._stream is not None:
            # One write: ranks share stderr, and print() may write the line's end apart.
            self._stream.write(f"{line}\n")
            self._stream.flush()


def format_step(step: int, total: int, row: Mapping[str, float]) -> str:
    """One line of fixed columns, such as
    `step   12/100  reward 0.431  17.2k tok/s  gen 0.35s  sync 0.02s  train 0.18s  eta 0:52`, or
    without rollouts `step   12/100  loss 1.431  17.2k tok/s  train 0.18s  eta 0:52`.
    """
    width, left_s = len(str(total)), row.get("time/left_s")
    times = [("gen", "time/rollout_s"), ("sync", "time/sync_s"), ("train", "time/train_s")]
    if (reward := row.get("rollout/reward_mean")) is not None:
        result, tokens_per_s = f"reward {reward:.3f}", row.get("rollout/tokens_per_s")
    else:
        result, tokens_per_s = f"loss {row['train/loss']:.3f}", row["sft/tokens_per_s"]
    speed = "-"
    if tokens_per_s is not None:
        is_slow = round(tokens_per_s) < 1000
        speed = f"{tokens_per_s:.0f}" if is_slow else f"{tokens_per_s / 1000:.1f}k"
    columns = [
        f"step {step:>{width}}/{total}",
        result,
        f"{speed} tok/s",
        *(f"{label} {row[name]:.2f}s" for label, name in times if name in row),
        f"eta {'-:--' if left_s is None else format_duration(left_s)}",
    ]
    return "  ".join(columns)


class _Rows:
    """The rows at the bottom of a terminal. Other lines of this process stay above them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console: Any = None
        self._live: Any = None
        self._handlers: list[Any] = []  # of logging

    def print(self, line: str) -> None:
        if self._live is None:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        else:
            self._console.print(line, highlight=True, markup=False, soft_wrap=True)

    def draw(self, activities: list[Activity], now: float) -> None:
        """Replaces the rows; without any, the terminal is as if there had been none."""
        if not activities:
            self.close()
            return
        live = self._live or self._open()
        live.update(self._table(activities, now), refresh=True)

    def close(self) -> None:
        if self._live is None:
            return
        for handler in self._handlers:
            handler.setStream(self._stream)
        self._handlers = []
        self._live.stop()
        self._live = None

    def _open(self) -> Any:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._console = RichConsole(file=self._stream)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._live.start()  # replaces sys.stderr, so that its lines do not end up in the rows
        self._console.show_cursor(True)  # a process that is killed could not show it again
        for handler in cast("list[Any]", logging.getLogger().handlers):
            if getattr(handler, "stream", None) is self._stream:
                handler.setStream(sys.stderr)
                self._handlers.append(handler)
        return self._live

    def _table(self, activities: list[Activity], now: float) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        for activity in activities:
            total, done = activity.total, activity.num_done or 0
            bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH) if total else ""
            age = format_duration(now - activity.began_at)
            table.add_row(activity.text, bar, activity.amount, age)
        return table
