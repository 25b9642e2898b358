"""Reads the trace of a run, with the times of all processes on one clock.

Times in files are those of CLOCK_MONOTONIC, one clock for all processes since a machine was
started. Its offset to the wall clock is in the headers, so machines are as well aligned as their
wall clocks are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from umbra.runtime.errors import ConfigError
from umbra.runtime.tracing.spans import TraceEvent

LEAD: Final = "rank-0"
"""The process whose steps are the run's."""


class TracedProcess(NamedTuple):
    """A process of the run, with all of its starts."""

    node: str
    name: str


class Window(NamedTuple):
    """A part of the run by the wall clock, in ns."""

    start_ns: int
    stop_ns: int


_ALL: Final = Window(0, 2**63)


class TraceFiles:
    """The trace of a run, which may be in progress. Raises ConfigError if the run has none."""

    def __init__(self, run_dir: Path) -> None:
        self._paths = sorted((run_dir / "trace").glob("*.jsonl"), key=_in_order)
        headers = [header for path in self._paths for header, _ in _parts(path)]
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

    def events(
        self, window: Window = _ALL, process: str = ""
    ) -> Iterator[tuple[TracedProcess, TraceEvent]]:
        """Events by the wall clock, of all processes or those with a name, without torn lines."""
        for path in self._paths:
            for header, lines in _parts(path):
                source = TracedProcess(header["node"], header["process"])
                if process and process != source.name:
                    continue
                offset_ns = self._offset_ns[header["boot_id"]]
                start_ns, stop_ns = window.start_ns - offset_ns, window.stop_ns - offset_ns
                for event in _events(lines):
                    if event[1] < stop_ns and event[1] + event[2] >= start_ns:
                        kind, begin_ns, *others = event
                        yield source, TraceEvent(kind, begin_ns + offset_ns, *others)

    def find_steps(self, first: int, last: int) -> Window:
        """The time from the beginning of a step to the beginning of the one after `last`. The
        newest steps count if the run was resumed or replaced. Raises ConfigError if the trace
        lacks these steps."""
        steps = [event for _, event in self.events(process=LEAD) if event.name == "step"]
        steps.sort(key=lambda event: event.start_ns)
        kept: dict[int, TraceEvent] = {}
        for event in steps:
            number = int(event.args["step"])
            while kept and next(reversed(kept)) >= number:
                kept.popitem()
            kept[number] = event
        missing = next((step for step in range(first, last + 1) if step not in kept), None)
        if missing is not None:
            has = f"has the steps {min(kept)}:{max(kept)}" if kept else "has no step yet"
            raise ConfigError(f"the trace {has}, but not step {missing}: give others as --steps")
        after = [event.start_ns for event in steps if event.start_ns > kept[last].start_ns]
        return Window(kept[first].start_ns, min(after, default=_ALL.stop_ns))


def _in_order(path: Path) -> tuple[str, bool]:
    name = path.name.removesuffix(".jsonl")
    return name.removesuffix(".old"), not name.endswith(".old")


def _parts(path: Path) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """The header of each start of a process, with the lines of events that follow it."""
    header: dict[str, Any] | None = None
    lines: list[bytes] = []
    for line in path.read_bytes().splitlines():
        if not line.startswith(b"{"):
            lines.append(line)
            continue
        if header is not None:
            yield header, lines
        header, lines = _parse(line), []
    if header is not None:
        yield header, lines


def _events(lines: list[bytes]) -> Iterator[list[Any]]:
    for line in lines:
        yield from _parse(line) or ()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
