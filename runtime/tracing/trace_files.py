"""Reads the trace of a run, with the times of all processes on one clock, and converts it.

`trace_json` makes trace event JSON of it, which https://ui.perfetto.dev opens.

Times in files are those of CLOCK_MONOTONIC, one clock for all processes since a machine was
started. Its offset to the wall clock is in the headers, so machines are as well aligned as their
wall clocks are.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from umbra.runtime.disk import writing_output
from umbra.runtime.errors import ConfigError
from umbra.runtime.tracing.spans import TraceEvent

LEAD: Final = "rank-0"
"""The process whose steps are the run's."""

_ORDER: Final = ("rank-", "supervisor", "rollouts")
"""Processes as they are shown, by the beginning of their names; engines and workers follow."""


_FORMATS: Final = (".json", ".json.gz")


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


def trace_json(events: Iterable[tuple[TracedProcess, TraceEvent]]) -> list[dict[str, Any]]:
    """Names first, then everything by time, in microseconds since the first event.

    Every process is a process there, and every track a thread. Spans are complete events ("X"),
    those that overlap are pairs of "b" and "e", and flow events ("s", "f") lead from a rank's sync
    to the engines that load its version.

        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    sources = sorted(events, key=lambda item: (item[1].start_ns, -item[1].duration_ns))
    begin_ns = sources[0][1].start_ns if sources else 0
    pids = {p: pid for pid, p in enumerate(sorted({p for p, _ in sources}, key=_place), 1)}
    tids = {(process, ""): pid for process, pid in pids.items()}  # as of Linux' main threads
    syncs: dict[object, dict[str, Any]] = {}  # rank 0's, by version
    numbers = count(1)
    timed: list[dict[str, Any]] = []
    for process, event in sources:
        tid = tids.setdefault((process, event.track), len(tids) + 1)
        row = {"pid": pids[process], "tid": tid, "ts": (event.start_ns - begin_ns) / 1000}
        timed += _converted(event, row, numbers)
        version = event.args.get("version")
        if event.name == "sync" and process.name == LEAD:
            syncs[version] = row
        elif event.name == "load weights" and version in syncs:
            flow = {"name": "weights", "cat": "weights", "id": next(numbers)}
            timed += [{**flow, "ph": "s", **syncs[version]}, {**flow, "ph": "f", "bp": "e", **row}]
    timed.sort(key=lambda event: event["ts"])  # stable: an outer span precedes its inner ones
    return [*_names(pids, tids), *timed]


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Writes them, compressed if the name ends with .gz; the viewer reads both."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    lines = ",\n".join(map(encode, events))
    text = f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode()
    path.write_bytes(gzip.compress(text, compresslevel=5) if path.suffix == ".gz" else text)


def _converted(
    event: TraceEvent, row: dict[str, Any], numbers: Iterator[int]
) -> Iterator[dict[str, Any]]:
    common = {"name": event.name, "cat": "umbra", **row, "args": event.args}
    duration_us = event.duration_ns / 1000
    match event.kind:
        case "X":
            yield {**common, "ph": "X", "dur": duration_us}
        case "b":
            number = next(numbers)
            yield {**common, "ph": "b", "id": number}
            yield {**common, "ph": "e", "id": number, "ts": row["ts"] + duration_us, "args": {}}
        case "i":
            yield {**common, "ph": "i", "s": "t"}
        case _:
            yield {**common, "ph": "C"}


def _place(process: TracedProcess) -> tuple[int, str, str, int]:
    """Sorts processes for display: rank-10 after rank-9."""
    head, _, tail = process.name.rpartition("-")
    place = next((i for i, begin in enumerate(_ORDER) if process.name.startswith(begin)), 9)
    if tail.isdecimal():
        return place, head, process.node, int(tail)
    return place, process.name, process.node, -1


def _names(
    pids: dict[TracedProcess, int], tids: dict[tuple[TracedProcess, str], int]
) -> Iterator[dict[str, Any]]:
    has_nodes = len({process.node for process in pids}) > 1
    for process, pid in pids.items():
        name = f"{process.name} ({process.node})" if has_nodes else process.name
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (process, track), tid in tids.items():
        names = {"name": track or process.name}
        yield {"ph": "M", "name": "thread_name", "pid": pids[process], "tid": tid, "args": names}


def run(arguments: argparse.Namespace) -> int:
    """The command `umbra trace`."""
    run_dir, output = Path(arguments.run_dir), arguments.output
    if output and not output.endswith(_FORMATS):
        raise ConfigError(f"-o {output}: end the name with {' or '.join(_FORMATS)}")
    files = TraceFiles(run_dir)
    events, name = files.events(), "all"
    if arguments.steps:
        first, last = arguments.steps
        events = files.events(files.find_steps(first, last))
        name = f"steps-{first}-{last}"
    path = Path(output or run_dir / "trace" / f"{name}.json.gz")
    with writing_output(path):
        write_trace(path, trace_json(events))
    print(f"{path}: open it at https://ui.perfetto.dev")
    return 0
