"""Reads the trace of a run: what each process recorded, with the times of all on one clock.

Times in files are those of CLOCK_MONOTONIC, one clock for all processes since a machine was
started. Its offset to the wall clock is in the headers, so machines are as well aligned as their
wall clocks are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import ConfigError
from umbra.runtime.tracing.spans import TraceEvent

LEAD: Final = "rank-0"
"""The process whose steps are the run's."""


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """A process of the run, with all of its starts."""

    node: str
    name: str


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the run by the wall clock, in ns."""

    start_ns: int
    stop_ns: int

    def has(self, event: TraceEvent) -> bool:
        start_ns = event.start_ns
        return start_ns < self.stop_ns and start_ns + event.duration_ns >= self.start_ns


class TraceFiles:
    """The trace of a run, which may be in progress.

    Raises:
        ConfigError: the run has none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._paths = sorted((run_dir / "trace").glob("*.jsonl"), key=_in_order)
        headers = [header for path in self._paths for header in _lines(path) if _is_header(header)]
        if not headers:
            raise ConfigError(
                f"{run_dir} has no trace: give the run.dir of a run that was started with "
                "run.trace = true"
            )
        # The newest header of each boot counts, as clocks may have been set right meanwhile.
        headers.sort(key=lambda header: header["monotonic_ns"])
        self._offset_ns = {
            header["boot_id"]: header["time_ns"] - header["monotonic_ns"] for header in headers
        }

    def events(self, process: str = "") -> Iterator[tuple[TracedProcess, TraceEvent]]:
        """All events, or those of processes of that name, by the wall clock. A line that a kill
        tore is left out."""
        for path in self._paths:
            source, offset_ns = TracedProcess("", ""), 0
            for line in _lines(path):
                if _is_header(line):
                    source = TracedProcess(line["node"], line["process"])
                    offset_ns = self._offset_ns[line["boot_id"]]
                elif source.name and process in ("", source.name):
                    for kind, start_ns, *others in line:
                        yield source, TraceEvent(kind, start_ns + offset_ns, *others)

    def find_steps(self, first: int, last: int) -> Window:
        """The time from the beginning of a step to the beginning of the one after `last`.

        If the run was resumed from a checkpoint, or replaced, its newest steps count.

        Raises:
            ConfigError: the trace does not have these steps.
        """
        steps = [event for _, event in self.events(LEAD) if event.name == "step"]
        steps.sort(key=lambda event: event.start_ns)
        kept: dict[int, TraceEvent] = {}
        for event in steps:
            number = int(event.args["step"])
            kept = {step: other for step, other in kept.items() if step < number}
            kept[number] = event
        missing = [step for step in range(first, last + 1) if step not in kept]
        if missing:
            has = f"has the steps {min(kept)}:{max(kept)}" if kept else "has no step yet"
            raise ConfigError(f"the trace {has}, but not step {missing[0]}: give others as --steps")
        after = [event.start_ns for event in steps if event.start_ns > kept[last].start_ns]
        return Window(kept[first].start_ns, min(after, default=2**63))


def _in_order(path: Path) -> tuple[str, bool]:
    """The older of a process's files first."""
    name = path.name.removesuffix(".jsonl")
    return name.removesuffix(".old"), not name.endswith(".old")


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # empty, or torn by a kill
                continue


def _is_header(line: object) -> bool:
    return isinstance(line, dict)
