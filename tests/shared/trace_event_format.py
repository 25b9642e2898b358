"""Checks a timeline against the trace event format, as a viewer reads it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_timeline(path: Path) -> list[Event]:
    """The events of a file of `umbra trace`, which follow the format."""
    with gzip.open(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    check_timeline(events)
    return events


def check_timeline(events: Sequence[Event]) -> None:
    """Asserts that times ascend, spans of a track nest, pairs are complete, rows have names, and
    arrows begin and end in spans."""
    timed = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert times == sorted(times)
    assert all(time >= 0 for time in times)
    named = {(e["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    for event in timed:
        assert ("process_name", event["pid"], None) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
    spans = defaultdict[tuple[int, int], list[Event]](list)
    for event in timed:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    for track in spans.values():
        _check_nesting(track)
    for first, second in (("b", "e"), ("s", "f")):
        begun = {e["id"]: e["ts"] for e in timed if e["ph"] == first}
        ended = {e["id"]: e["ts"] for e in timed if e["ph"] == second}
        assert begun.keys() == ended.keys()
        assert all(begun[number] <= ended[number] for number in begun)
    for arrow in (event for event in timed if event["ph"] in "sf"):
        row = spans[arrow["pid"], arrow["tid"]]
        assert any(e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] for e in row), arrow


def _check_nesting(track: Sequence[Event]) -> None:
    ends: list[float] = []
    for event in track:
        while ends and ends[-1] <= event["ts"] + 0.001:  # rounded to whole ns
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 0.001, f"{event} does not nest"
        ends.append(end)


def spans_of(events: Sequence[Event], process: str, name: str) -> list[Event]:
    """Complete spans and the beginnings of overlapping ones."""
    pids = {
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"] == process
    }
    return [e for e in events if e["name"] == name and e["ph"] in "Xb" and e["pid"] in pids]
