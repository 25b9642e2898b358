"""Records the work of this process for a trace:

    with span("train", step=3):        measures and records a block
    past_span("group", began_s)        records a span that ends now
    instant("ended")                   records a moment
    gauge("requests", read)            records numbers, once a second

Nothing is recorded in a process whose main program has not entered `recording`; a span then only
measures its time. Recording is an append to a bounded queue, without a lock or a system call but
for the clock's; `TraceWriter` takes the events from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Self

Argument = str | int | float

QUEUE_LEN: Final = 1 << 14
"""Events that wait for the writer; later ones are lost. A longer queue takes memory while the file
system hangs; a shorter one loses events of a burst."""


class TraceEvent(NamedTuple):
    kind: str  # X span, b span that overlaps others of its track, i instant, C numbers
    start_ns: int  # by CLOCK_MONOTONIC, which all processes of a machine share
    duration_ns: int
    track: str  # row within the process; "" for its main one
    name: str
    args: Mapping[str, Argument]


class Recording:
    """The events of this process that the writer has not taken yet, and the gauges to read."""

    def __init__(self) -> None:
        self.events: deque[TraceEvent] = deque(maxlen=QUEUE_LEN)
        self.gauges: dict[str, Callable[[], Mapping[str, float]]] = {}


_current: list[Recording] = []


def set_recording(recording: Recording | None) -> None:
    _current[:] = [] if recording is None else [recording]


class span:
    """Measures the block, and records it under `name`; `seconds` has the duration at its end. Spans
    of a `track`, a row within the process, nest, unless `overlaps` says that they run at the same
    time. `args` are short values, shown with the span."""

    __slots__ = ("_args", "_name", "_overlaps", "_start_ns", "_track", "seconds")

    def __init__(
        self, name: str, track: str = "", *, overlaps: bool = False, **args: Argument
    ) -> None:
        self._name = name
        self._track = track
        self._overlaps = overlaps
        self._args = args
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        duration_ns = time.monotonic_ns() - self._start_ns
        self.seconds = duration_ns / 1e9
        if _current:
            if kind is not None:
                self._args["error"] = kind.__name__
            sort = "b" if self._overlaps else "X"
            _current[0].events.append(
                TraceEvent(sort, self._start_ns, duration_ns, self._track, self._name, self._args)
            )


def past_span(
    name: str, began_s: float, track: str = "", *, overlaps: bool = False, **args: Argument
) -> None:
    """The span began at `began_s`, by `time.monotonic()`, and ends now."""
    if _current:
        start_ns = int(began_s * 1e9)
        duration_ns = time.monotonic_ns() - start_ns
        kind = "b" if overlaps else "X"
        _current[0].events.append(TraceEvent(kind, start_ns, duration_ns, track, name, args))


def instant(name: str, track: str = "", **args: Argument) -> None:
    if _current:
        _current[0].events.append(TraceEvent("i", time.monotonic_ns(), 0, track, name, args))


def gauge(name: str, read: Callable[[], Mapping[str, float]]) -> None:
    """Records the numbers of `read`, once a second from here on. Another thread calls `read`, so it
    may only look at values that one operation returns, such as a length."""
    if _current:
        _current[0].gauges[name] = read
