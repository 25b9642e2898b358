"""events.jsonl in the run directory: events of all nodes, written by rank 0's supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

logger = logging.getLogger(__name__)

EventKind = Literal[
    "restart", "serves", "fault", "joined", "left", "lost", "sync_failed", "failed", "stop",
    "checkpoint", "note",
]  # fmt: skip
Notify = Callable[[str, EventKind, str], None]
"""Called with a line for the operator, its kind, and its subject."""
_MAX_TEXT_LEN: Final = 4000
"""A failure's text may have hundreds of log lines, which are in logs/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A line of events.jsonl.

    Attributes:
        time: in seconds since 1970.
        kind: see docs/run-directory.md.
        who: the actor, pool, node or process that it is about, or "job".
        text: event and reason in words; further lines come from a traceback or log.
    """

    time: float
    kind: EventKind
    who: str
    text: str


def read_events(run_dir: Path) -> list[RunEvent]:
    events: list[RunEvent] = []
    try:
        lines = (run_dir / "events.jsonl").read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return events
    for line in lines:
        try:
            events.append(RunEvent(**json.loads(line)))
        except (ValueError, TypeError):  # the writer was killed, or has not finished the line
            continue
    return events


class EventLog:
    """Appends events. `run` lives until `close`. Owned by the supervisor. The directory may be on a
    shared file system that answers late, so a thread writes. Each write opens the file, because a
    run that replaces another one moves its file away."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "events.jsonl"
        self._lines: list[str] = []  # bounded by the restart policies of all actors
        self._changed = asyncio.Event()
        self._is_closed = False

    def add(self, kind: EventKind, who: str, text: str) -> None:
        event = RunEvent(time=time.time(), kind=kind, who=who, text=text[:_MAX_TEXT_LEN])
        self._lines.append(json.dumps(asdict(event)) + "\n")
        self._changed.set()

    def close(self) -> None:
        """Lets `run` return once all is written."""
        self._is_closed = True
        self._changed.set()

    async def run(self) -> None:
        while self._lines or not self._is_closed:
            await self._changed.wait()
            self._changed.clear()
            lines, self._lines = self._lines, []
            await asyncio.to_thread(self._append, "".join(lines))

    def _append(self, text: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # the job does not need it, and the log has the same
            logger.warning("cannot write %s: %s", self._path, error)
