"""Records the work of this process for a trace:

    with span("train", step=3):        measures and records a block
    past_span("group", began_s)        records a span that ends now
    instant("ended")                   records a moment
    gauge("requests", read)            records numbers, once a second

Nothing is recorded in a process whose main program has not entered `recording`; a span then only
measures its time. Recording is an append to a bounded queue, without a lock or a system call but
for the clock's. From there a thread writes the events to files of the run directory:

    RUN_DIR/trace/NODE.PROCESS.jsonl        a line with a header for each start of the process,
                                            then lines with lists of events
    RUN_DIR/trace/NODE.PROCESS.old.jsonl    what came before, once the first had reached its size

Both belong to the process's name, so that restarts take no further space. A killed process loses
the events of its last second.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

Argument = str | int | float

QUEUE_LEN: Final = 1 << 14
"""Events that wait for the writer; later ones are lost. A longer queue takes memory while the file
system hangs; a shorter one loses events of a burst."""

MAX_FILE_NBYTES: Final = 16 << 20
"""Size of each of a process's two files. Larger keeps more steps; smaller fills the disk less."""
_INTERVAL_S: Final = 1.0
"""Interval of writes. Longer: a killed process loses more. Shorter: idle processes wake."""
_JOIN_LIMIT_S: Final = 2.0
"""Deadline of the last write. Longer: a file system that hangs delays the end of the process."""
_LINE_LEN: Final = 1000
"""Events of a line. More hold the interpreter for over a millisecond; few take twice the time."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


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


logger = logging.getLogger(__name__)


@contextmanager
def recording(
    folder: str, node_id: str, process: str, *, max_file_nbytes: int = MAX_FILE_NBYTES
) -> Generator[None]:
    """Records this process's events in the block, for main programs; nothing without a folder."""
    if not folder:
        yield
        return
    writer = TraceWriter(Path(folder), node_id, process, max_file_nbytes)
    set_recording(writer.recording)
    try:
        with writer:
            yield
    finally:
        set_recording(None)


class TraceWriter:
    """Owns the thread, and is the only one to write the file. If that fails, recording ends with a
    warning: a run does not fail because of its trace."""

    def __init__(self, folder: Path, node_id: str, process: str, max_file_nbytes: int) -> None:
        self.recording = Recording()
        self._path = folder / f"{node_id}.{process}.jsonl"
        self._node_id = node_id
        self._process = process
        self._needs_header = True
        self._max_file_nbytes = max_file_nbytes
        self._last_values: dict[str, Mapping[str, float]] = {}  # of gauges
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="trace", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_LIMIT_S)

    def _write_all(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._stop.wait(_INTERVAL_S)
                self._read_gauges()
                if lines := self._take_lines():
                    self._append(lines)
        except OSError as error:
            set_recording(None)
            logger.warning("the trace ends here: cannot write %s: %s", self._path, error)

    def _append(self, lines: bytes) -> None:
        """One write, so that a kill tears at most the last line; a header begins a new one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        nbytes = self._path.stat().st_size if self._path.exists() else 0
        if nbytes and nbytes + len(lines) > self._max_file_nbytes:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
            nbytes = 0
        if self._needs_header or not nbytes:
            lines = b"\n" + json.dumps(self._header()).encode() + b"\n" + lines
            self._needs_header = False
        with self._path.open("ab", buffering=0) as file:
            file.write(lines)

    def _header(self) -> dict[str, object]:
        return {
            "node": self._node_id,
            "process": self._process,
            "pid": os.getpid(),
            "boot_id": _BOOT_ID.read_text(encoding="ascii").strip(),
            "monotonic_ns": time.monotonic_ns(),
            "time_ns": time.time_ns(),
        }

    def _read_gauges(self) -> None:
        """A value that stays zero is recorded once."""
        for name, read in list(self.recording.gauges.items()):
            values = dict(read())
            if any(values.values()) or self._last_values.get(name) != values:
                self._last_values[name] = values
                event = TraceEvent("C", time.monotonic_ns(), 0, "", name, values)
                self.recording.events.append(event)

    def _take_lines(self) -> bytes:
        events, lines = self.recording.events, list[str]()
        while events:
            batch = [events.popleft() for _ in range(min(len(events), _LINE_LEN))]
            lines.append(json.dumps(batch, separators=(",", ":")))
        return "".join(f"{line}\n" for line in lines).encode()
