from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, Final, TypeVar, cast, get_args

from umbra.runtime.dash.sample_texts import Order, SampleIndex
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.reports.job_state import job_state
from umbra.runtime.reports.run_metrics import (
    PANELS,
    recorded_choices,
    recorded_setting,
    total_steps,
)
from umbra.runtime.settings import to_wire

T = TypeVar("T")

_MOST_ROWS: Final = 1000
"""Steps of one answer. More than a chart has pixels only slow the page down; fewer show as gaps."""
_JOB_MAX_AGE_S: Final = 1.0
"""However many pages are open, the supervisor is asked no more often."""
_MOST_EVENTS: Final = 500
_MOST_EVALUATIONS: Final = 50
_MOST_SAMPLES: Final = 100
_REPORT_SAMPLES: Final = 10
"""Samples of each order whose texts a report has. More make it slow to write and to send."""

_CONSTANT: Final = re.compile(r"NaN|Infinity")


class RunView:
    """The page's view of a run, read from its directory and its supervisor, also after the run's
    end. Files are read in threads, and each part of them by one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._metrics = JsonLines(run_dir / "metrics.jsonl", ("eval/accuracy", "eval/loss"))
        self._events = JsonLines(run_dir / "events.jsonl")
        self._evaluations = JsonLines(run_dir / "eval_samples.jsonl")
        self._samples = SampleIndex(run_dir)
        self._job: dict[str, Any] = {}
        self._job_read_at = -math.inf
        self._job_lock = asyncio.Lock()
        self._metrics_lock = asyncio.Lock()
        self._events_lock = asyncio.Lock()
        self._evaluations_lock = asyncio.Lock()
        self._samples_lock = asyncio.Lock()

    async def read_ahead(self) -> None:
        """Reads the files, so that the first page need not wait for it."""
        with contextlib.suppress(UmbraError, OSError):  # the request that needs it gets the error
            await self.metrics(0)
            async with self._samples_lock:
                await _in_thread(self._samples.open)

    async def state(self) -> str:
        """JSON: the run's name, settings, number of steps and end, the panels of its metrics,
        and the state of its job: null if no supervisor is found here, because the run has ended
        or is elsewhere."""
        facts = await _in_thread(lambda: _facts(self._run_dir))
        async with self._job_lock:
            now = time.monotonic()
            if now - self._job_read_at > _JOB_MAX_AGE_S:
                self._job, self._job_read_at = await _ask_job(self._run_dir), now
            return json.dumps(facts | self._job | {"time": time.time()})

    async def metrics(self, first: int) -> str:
        """JSON: the rows of metrics.jsonl from number `first` on, thinned evenly if they are very
        many, with all evaluations, which may come after later steps, and the last row."""
        async with self._metrics_lock:
            await _in_thread(self._metrics.read_on)
            rows, encoded = self._metrics.rows, self._metrics.encoded
            thinned = _thinned(first, len(rows), _MOST_ROWS)
            kept = [encoded[idx] for idx in range(first, len(rows)) if idx in thinned or rows[idx]]
            return _answer(self._metrics, kept)

    async def events(self, first: int) -> str:
        """JSON: the events from number `first` on, the newest of them if there are very many."""
        async with self._events_lock:
            await _in_thread(self._events.read_on)
            return _answer(self._events, self._events.encoded[first:][-_MOST_EVENTS:])

    async def evaluations(self, first: int) -> str:
        """JSON: the samples of evaluations from number `first` on, thinned as the metrics."""
        async with self._evaluations_lock:
            await _in_thread(self._evaluations.read_on)
            encoded = self._evaluations.encoded
            thinned = _thinned(first, len(encoded), _MOST_EVALUATIONS)
            return _answer(self._evaluations, [encoded[idx] for idx in thinned])

    async def samples(self, order: Order, step: int | None, most: int = _MOST_SAMPLES) -> str:
        """JSON: samples without their texts."""

        def choose() -> dict[str, Any]:
            self._samples.refresh()
            samples, num_samples = self._samples.choose(order, most, step)
            return {"samples": samples, "num_samples": num_samples}

        async with self._samples_lock:
            return json.dumps(await _in_thread(choose))

    async def sample(self, sample_id: str) -> str:
        """JSON: one sample with its text."""

        def read() -> dict[str, Any]:
            self._samples.refresh()
            return self._samples.sample(sample_id)

        async with self._samples_lock:
            return json.dumps(await _in_thread(read))

    async def recorded(self) -> str:
        """JSON: the answers that a report has, by the address that the page asks for. They have no
        job, and texts of few samples only; samples that cannot be read are left out."""
        facts = _facts(self._run_dir) | {"job": None, "problem": "", "time": time.time()}
        answers = {
            "api/state": json.dumps(facts),
            "api/metrics?from=0": await self.metrics(0),
            "api/events?from=0": await self.events(0),
            "api/evaluations?from=0": await self.evaluations(0),
        }
        for order in get_args(Order):
            with contextlib.suppress(UmbraError, OSError):
                listed = await self.samples(order, None, _REPORT_SAMPLES)
                answers[f"api/samples?order={order}"] = listed
                for sample_id in [sample["sample_id"] for sample in json.loads(listed)["samples"]]:
                    answers[f"api/sample/{sample_id}"] = await self.sample(sample_id)
        members = ", ".join(f"{json.dumps(path)}: {text}" for path, text in answers.items())
        return f"{{{members}}}"


async def _in_thread(read: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but in a daemon thread: the program's end does not wait for it,
    which may be reading a long ledger or a file system that does not answer."""
    outcome = Future[T]()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(read())
        except Exception as error:  # noqa: BLE001 -- raised where the outcome is awaited
            outcome.set_exception(error)

    Thread(target=run, name="umbra-dash", daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def _ask_job(run_dir: Path) -> dict[str, Any]:
    try:
        job = await job_state(run_dir)
    except UmbraError as error:  # the files still have much to show
        return {"job": None, "problem": str(error)}
    return {"job": None if job is None else to_wire(job), "problem": ""}


def _facts(run_dir: Path) -> dict[str, Any]:
    """The settings and the end that the run's files have, and the panels."""
    if not run_dir.is_dir():
        raise ConfigError(f"the run directory {run_dir} is gone")
    return {
        "name": recorded_setting(run_dir, "run", "name") or run_dir.absolute().name,
        "steps": total_steps(run_dir) or None,
        "summary": _read_json(run_dir / "summary.json"),
        "settings": recorded_choices(run_dir),
        "panels": to_wire(PANELS),
    }


def _read_json(path: Path) -> Any:
    """None if there is no such file, or not yet."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def _thinned(start: int, stop: int, most: int) -> range:
    """About `most` of these numbers, evenly spread, with the last."""
    stride = 1 + max(0, stop - start) // most
    return range(start + (stop - 1 - start) % stride, stop, stride)


def _answer(lines: JsonLines, kept: Sequence[str]) -> str:
    rows = ", ".join(kept)
    return f'{{"file": {lines.times_replaced}, "num_rows": {len(lines.rows)}, "rows": [{rows}]}}'


class JsonLines:
    """Reads a JSON Lines file as it grows: each line once. A file that was replaced is read
    from its beginning."""

    def __init__(self, path: Path, keys: tuple[str, ...] = ()) -> None:
        self.rows: list[dict[str, Any]] = []  # the `keys` of each object
        self.encoded: list[str] = []  # whole objects as text; NaN is null
        self.times_replaced = 0  # changes when the rows are those of another file
        self._path = path
        self._keys = keys
        self._inode = 0
        self._offset = 0

    def read_on(self) -> None:
        """A missing file has no lines."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._begin(stat.st_ino)
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._add(line)
        except FileNotFoundError:
            self._begin(0)

    def _add(self, line: bytes) -> None:
        try:
            text = line.decode().strip()
            row: Any = json.loads(text, parse_constant=lambda _: None)
        except ValueError:
            return
        if isinstance(row, dict):
            found = cast("dict[str, Any]", row)
            self.rows.append({key: found[key] for key in self._keys if key in found})
            self.encoded.append(json.dumps(found) if _CONSTANT.search(text) else text)

    def _begin(self, inode: int) -> None:
        if self._offset:
            self.times_replaced += 1
        self.rows, self.encoded, self._inode, self._offset = [], [], inode, 0
