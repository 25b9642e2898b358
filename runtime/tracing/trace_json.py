"""Turns a run's trace into trace event JSON, which https://ui.perfetto.dev opens.

Every process is a process there, and every track a thread. Spans are complete events ("X"), those
that overlap are pairs of "b" and "e", and flow events ("s", "f") lead from a rank's sync to the
engines that load its version.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from umbra.runtime.tracing.spans import TraceEvent
from umbra.runtime.tracing.trace_files import LEAD, TracedProcess

_ORDER: Final = ("rank-", "supervisor", "rollouts")
"""Processes as they are shown, by the beginning of their names; engines and workers follow."""


def trace_json(events: Iterable[tuple[TracedProcess, TraceEvent]]) -> list[dict[str, Any]]:
    """Names first, then everything by time, in microseconds since the first event."""
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
