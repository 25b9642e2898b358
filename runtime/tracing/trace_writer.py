"""Writes the events of this process to a file of the run directory, from a thread of its own.

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
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from umbra.runtime.tracing.spans import Recording, TraceEvent, set_recording

logger = logging.getLogger(__name__)

MAX_FILE_NBYTES: Final = 16 << 20
"""Size of each of a process's two files. Larger keeps more steps; smaller fills the disk less."""
_INTERVAL_S: Final = 1.0
"""Interval of writes. Longer: a killed process loses more. Shorter: idle processes wake."""
_JOIN_LIMIT_S: Final = 2.0
"""Deadline of the last write. Longer: a file system that hangs delays the end of the process."""
_LINE_LEN: Final = 1000
"""Events of a line. More hold the interpreter for over a millisecond; few take twice the time."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


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
