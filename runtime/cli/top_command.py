"""`umbra top RUN_DIR`: shows what a run is doing, again each second, or once."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from umbra.runtime.cluster.run_events import RunEvent, read_events
from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.reports.job_state import (
    EngineStatus,
    JobState,
    RankStatus,
    job_state,
    run_interruptibly,
)
from umbra.runtime.reports.run_metrics import Row, last_steps, total_steps
from umbra.runtime.terminal_text import escape_unprintable, format_duration

_INTERVAL_S: Final = 1.0
"""Interval of frames. Shorter costs the job's processes time and can hardly be read."""
_WIDTH: Final = 200
"""Line length without a terminal."""

_NUMBER: Final = re.compile(r"[\d.]+(:\d\d)?|-|")
_BAR_LEN: Final = 20
_NUM_EVENTS: Final = 5
_NUM_PIDS: Final = 4
"""Ranks named that wait for the same; `umbra dump` has all."""
_LONG_S: Final = 30.0
"""Age from which a wait or a step may be a hang, if it is also three times as long as the last
step. Sooner alarms for nothing; later leaves a person without the hint."""
_FIXED_HEIGHT: Final = 20
"""Lines of a frame beside the table of engines, with some ranks and actors."""
_PARTS: Final = ("rollout", "train", "sync", "sleep")
"""Parts of a step's time, as in `time/rollout_s`; the rest is shown as `other`."""

_ENGINE_HEADINGS: Final = [
    "ENGINE", "NODE", "GPUS", "PID", "STATE", "SINCE", "VERSION", "RUNNING", "WAITING", "RESTARTS",
]  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Shows frames until Ctrl-C, or, without a terminal, prints them until the job ends."""
    run_dir = Path(arguments.run_dir)
    console = Console()
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        _print_frames(run_dir, once=arguments.once)
    else:
        screen = Live(console=console, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), screen:
            while True:
                view, (width, height) = look(run_dir), screen.console.size
                lines = frame(view, time.time(), width=width, height=height)
                screen.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    name: str  # of the run
    state: JobState | None  # None if no job runs
    run_dir: str = "RUN_DIR"  # as the person wrote it
    problem: str = ""  # why the state is unknown, although a job may run; else ""
    steps: Sequence[Row] = ()  # metrics of the last steps, the oldest first
    total_steps: int = 0  # 0 if it is unknown
    events: Sequence[RunEvent] = field(default_factory=list[RunEvent])  # the oldest first


def frame(view: RunSnapshot, now: float, *, width: int, height: int | None = None) -> list[str]:
    """The lines of a frame at `now`, in seconds since 1970, cut off at `width`. Engines that would
    not fit into `height` are summed up; None shows all."""
    lines = [*_progress_lines(view, now), ""]
    if view.state is None:
        lines.append(view.problem or "no job of this run is running on this machine")
    else:
        lines += _wrapped(f"now: {view.state.phase}", width)
        lines += [part for line in view.state.stopped for part in _wrapped(line, width)]
        if _may_hang(view.state, view.steps, now):
            lines += _wrapped(f"`umbra dump {view.run_dir}` shows where every process is", width)
        lines += _state_lines(view.state, height)
    if view.events:
        lines += ["", *_event_lines(_newest(view.events))]
    return [escape_unprintable(line, keep="")[:width].rstrip() for line in lines]


def _progress_lines(view: RunSnapshot, now: float) -> list[str]:
    if not view.steps:
        return [f"{view.name}   no step is done yet"]
    row, total = view.steps[-1], view.total_steps
    done = int(row["step"])
    parts = [view.name, f"step {done}"]
    if total:
        num_full = min(_BAR_LEN, _BAR_LEN * done // total)
        parts[1] += f"/{total}"
        parts.append(f"[{'#' * num_full}{'-' * (_BAR_LEN - num_full)}]")
    if view.state is not None and "time/left_s" in row:
        parts.append(f"eta {format_duration(row['time/left_s'])}")
    parts.append(f"last step {format_duration(max(0.0, now - row['time']))} ago")
    return ["   ".join(parts), _reward_line(row), _time_line(row)]


def _reward_line(row: Row) -> str:
    words = [
        ("reward", "rollout/reward_mean", "{:.3f}"),
        ("best", "rollout/reward_max", "{:.3f}"),
        ("tok/s", "rollout/tokens_per_s", "{:,.0f}"),
        ("staleness", "rollout/staleness_mean", "{:.2f}"),
        ("version", "sync/version", "{:.0f}"),
        ("engines idle", "rollout/engine_idle_share", "{:.0%}"),
    ]
    return "   ".join(f"{word} {text.format(row[key])}" for word, key, text in words if key in row)


def _time_line(row: Row) -> str:
    spent = {name: row.get(f"time/{name}_s", 0.0) for name in _PARTS}
    spent["other"] = max(0.0, row["time/step_s"] - sum(spent.values()))
    parts = [f"{name} {seconds:.2f}" for name, seconds in spent.items()]
    return f"step {row['time/step_s']:.2f} s = {' + '.join(parts)}"


def _state_lines(state: JobState, height: int | None) -> list[str]:
    engines = state.engines
    limit = len(engines) if height is None else max(1, height - _FIXED_HEIGHT)
    lines: list[str] = []
    if state.failure:
        lines.append(f"FAILED: {state.failure.splitlines()[0]}")
    lines += [
        f"{node.name} does not answer: {node.problem}" for node in state.nodes if node.problem
    ]
    lines += ["", *_table(["RANKS", "WAIT FOR", "SECONDS", "PIDS"], _rank_rows(state))]
    lines += ["", *_table(_ENGINE_HEADINGS, _engine_rows(state, limit))]
    if len(engines) > limit:
        rest = Counter(engine.state for _, engine in _by_interest(engines)[limit:])
        counts = ", ".join(f"{count} {name}" for name, count in rest.items())
        lines.append(f"… and {len(engines) - limit} more: {counts}")
    if rollouts := state.rollouts:
        lines += [
            "",
            f"groups: {rollouts.groups_open} open, {rollouts.groups_ready} ready, "
            f"{rollouts.groups_leased} in training; done: {rollouts.groups_trained} trained, "
            f"{rollouts.groups_dropped} dropped",
            f"trajectories: {rollouts.trajectories_open} open with {rollouts.tokens:,} tokens, "
            f"{rollouts.turns_waiting} wait for an engine",
        ]
    if others := _other_actors(state):
        lines += ["", f"other processes: {others}"]
    return lines


def _rank_rows(state: JobState) -> list[list[str]]:
    waiting: defaultdict[tuple[str, bool], list[RankStatus]] = defaultdict(list)
    for rank in state.ranks:
        waiting[rank.waits_for, rank.is_stopped].append(rank)
    return [
        [
            ",".join(str(rank.rank) for rank in ranks),
            f"STOPPED{', in ' * bool(what)}{what}"
            if is_stopped
            else what or "no call: they compute, or wait for each other",
            f"{max(rank.waits_s for rank in ranks):.1f}" if what else "",
            ",".join(str(rank.pid) for rank in ranks[:_NUM_PIDS]) + ",…" * (len(ranks) > _NUM_PIDS),
        ]
        for (what, is_stopped), ranks in waiting.items()
    ]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _may_hang(state: JobState, steps: Sequence[Row], now: float) -> bool:
    """Whether something waits for so long that a person should look at where it is."""
    waits_s = [rank.waits_s for rank in state.ranks]
    if state.rollouts:
        waits_s.append(state.rollouts.scoring_s)
    limit_s = _LONG_S
    if steps:
        waits_s.append(now - steps[-1]["time"])
        limit_s = max(limit_s, 3 * steps[-1]["time/step_s"])
    return bool(state.stopped) or max(waits_s, default=0.0) > limit_s


def _by_interest(engines: Iterable[tuple[str, EngineStatus]]) -> list[tuple[str, EngineStatus]]:
    return sorted(engines, key=lambda item: item[1].state == "SERVING")


def _engine_rows(state: JobState, limit: int) -> list[list[str]]:
    engines = state.engines
    stopped = {actor.name for node in state.nodes for actor in node.actors if actor.is_stopped}
    shown = engines if len(engines) <= limit else _by_interest(engines)[:limit]
    return [
        [
            engine.name,
            engine.node_id or "-",
            ",".join(engine.gpus) or "-",
            str(engine.pid),
            "STOPPED" if engine.name in stopped else engine.state,
            format_duration(engine.state_age_s),
            _number(engine.version),
            _number(engine.running),
            _number(engine.waiting),
            str(engine.num_restarts),
        ]
        for _, engine in shown
    ]


def _other_actors(state: JobState) -> str:
    actors = [actor for node in state.nodes for actor in node.actors if actor.role != "engine"]
    return ", ".join(
        f"{actor.name} {'stopped by a signal' if actor.is_stopped else actor.state}"
        + (f" ({actor.num_restarts} restarts)" if actor.num_restarts else "")
        for actor in actors
    )


def _newest(events: Sequence[RunEvent]) -> Sequence[RunEvent]:
    """The last events, with the last checkpoint only, so that restarts stay in sight."""
    last = max((i for i, event in enumerate(events) if event.kind == "checkpoint"), default=-1)
    shown = [event for i, event in enumerate(events) if event.kind != "checkpoint" or i == last]
    return shown[-_NUM_EVENTS:]


def _event_lines(events: Iterable[RunEvent]) -> list[str]:
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            event.kind,
            event.who,
            event.text.splitlines()[0] if event.text else "",
        ]
        for event in events
    ]
    return _table(["TIME", "EVENT", "WHO", "WHAT"], rows)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers are aligned to the right."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(map(_NUMBER.fullmatch, cells)) for _, *cells in columns]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        for row in (headings, *rows)
    ]
