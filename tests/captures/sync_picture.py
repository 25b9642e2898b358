"""Draws one weight sync of a run: who does what and when, by the tracks of its trace.

    umbra trace RUN_DIR -o trace.json.gz
    python tests/captures/sync_picture.py trace.json.gz docs/weight-sync.svg [--version 3]

The trace may be one that a run on GPUs left (job `weights-trace` of tests/run_on_gpus.py).
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

_LEAD: Final = "rank-0"
_SUPERVISOR: Final = "supervisor"
_MARGIN: Final = 0.02
# Of the sync's length, before its beginning and after its end.
_LABEL_SHARE: Final = 0.01
# Of the width, which one letter takes: a name that does not fit its bar is only in the legend.
_HEIGHT: Final = 0.36
# Inches for a row.


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A span of the trace, in ms."""

    process: str
    track: str
    name: str
    start: float
    stop: float
    version: int | None

    @property
    def row(self) -> str:
        """Its process, and its track where that has another name."""
        is_main = self.track == self.process
        return self.process if is_main else f"{self.process}: {self.track}"


def read_slices(path: Path) -> list[Slice]:
    """The complete spans of a file of `umbra trace`, by their beginnings."""
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    names = {
        (event["name"], event["pid"], event.get("tid")): str(event["args"]["name"])
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    return [
        Slice(
            process=names["process_name", event["pid"], None],
            track=names["thread_name", event["pid"], event["tid"]],
            name=event["name"],
            start=event["ts"] / 1e3,
            stop=(event["ts"] + event["dur"]) / 1e3,
            version=event["args"].get("version"),
        )
        for event in events
        if event["ph"] == "X"
    ]


def slices_of_sync(slices: Sequence[Slice], version: int | None) -> tuple[Slice, list[Slice]]:
    """Rank 0's span of a sync, and by rows what ranks, supervisor and engines do for it meanwhile.

    Args:
        version: that was synced; None for the last one.
    """
    syncs = [
        each
        for each in slices
        if (each.process, each.name) == (_LEAD, "sync") and version in (None, each.version)
    ]
    if not syncs:
        raise SystemExit(f"the trace has no sync of version {version}: give another --version")
    sync = syncs[-1]
    engines = {each.process for each in slices if each.name == "load weights"}
    shown = [
        each
        for each in slices
        if (each.process.startswith("rank-") and each.name == "sync")
        or each.process in engines
        or (each.process == _SUPERVISOR and (each.track in engines or "sync" in each.track))
    ]
    meanwhile = [each for each in shown if each.stop > sync.start and each.start < sync.stop]
    return sync, sorted(meanwhile, key=_place)


def _place(each: Slice) -> tuple[int, str]:
    """Ranks come first, then the phases of the sync, the requests to engines, and the engines."""
    if each.process.startswith("rank-"):
        return 0, each.row
    if each.process == _SUPERVISOR:
        return (1 if "sync" in each.track else 2), each.row
    return 3, each.row


def draw(sync: Slice, slices: Sequence[Slice]) -> Figure:
    rows = list(dict.fromkeys(each.row for each in slices))
    names = list(dict.fromkeys(each.name for each in sorted(slices, key=lambda each: each.start)))
    palette = matplotlib.colormaps["tab20"]
    colors = {name: palette(idx % palette.N) for idx, name in enumerate(names)}
    figure = Figure(figsize=(10, 1.2 + _HEIGHT * len(rows)), layout="constrained")
    axes = figure.subplots()
    length = sync.stop - sync.start
    for each in slices:
        start, stop = max(each.start, sync.start), min(each.stop, sync.stop)
        y, width = rows.index(each.row), stop - start
        axes.barh(y, width, 0.7, start - sync.start, color=colors[each.name], label=each.name)
        if width > _LABEL_SHARE * len(each.name) * length:
            middle = (start + stop) / 2 - sync.start
            axes.text(middle, y, each.name, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(-_MARGIN * length, (1 + _MARGIN) * length)
    axes.set_xlabel("ms since rank 0 began the sync")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside upper left", ncols=7, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path, help="made by umbra trace")
    parser.add_argument("picture", type=Path, help="an .svg or .png")
    parser.add_argument("--version", type=int, help="of the weights (default: the last one)")
    given = parser.parse_args()
    sync, slices = slices_of_sync(read_slices(given.trace), given.version)
    matplotlib.rcParams["svg.hashsalt"] = "umbra"  # the same picture of the same trace
    draw(sync, slices).savefig(given.picture, dpi=150, metadata={"Date": None})


if __name__ == "__main__":
    main()
