"""Trajectories a second that the ledger has finished on disk, and how the loop fares."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Event,
    Finished,
    Scored,
    Started,
    Tokens,
    Version,
)
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_snapshot import read_content
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter

_GROUP_SIZE: Final = 8
TICK_SAMPLES: Final = 64  # that advance together, as in a batch of deltas
_NUM_TOKENS: Final = 256
_NUM_RUNS: Final = 5
_DRAWS: Final = np.random.default_rng(0)
_TOKEN_IDS: Final = _DRAWS.integers(0, 50_000, TICK_SAMPLES * _NUM_TOKENS, dtype=np.int32)
_LOGPROBS: Final = -_DRAWS.exponential(1.0, TICK_SAMPLES * _NUM_TOKENS).astype(np.float32)
# Random, because the ledger compresses them.
_PACE_PER_S: Final = 5_000  # more than a node's engines finish
_PACED_S = 3.0
_TICKER_S: Final = 0.001
_TIMEOUT_S: Final = 120.0


def run(num_trajectories: int = 100_000, folder: Path | None = None) -> dict[str, Any]:
    """Writes trajectories of 256 tokens in 5 runs, waits until they are on disk, reads them back.

    Returns:
        `trajectories_per_s` at full speed, from the first append until the last is durable;
        `cpu_us_per_trajectory` of this process; `nbytes_per_trajectory`; `replayed_per_s`; and how
        late a ticker of 1 ms was at worst: `blocked_max_ms` at full speed, `paced_blocked_max_ms`
        at 5,000 trajectories a second, `idle_blocked_max_ms` with no ledger, which is the machine's
        own share. `append_max_ms` is the longest single append.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place, paced_place = Path(scratch) / "full" / "bench", Path(scratch) / "paced" / "bench"
        idle_s = asyncio.run(_idle())
        facts = asyncio.run(_write(place, num_trajectories))
        paced = asyncio.run(
            _write(paced_place, int(_PACE_PER_S * _PACED_S), pace_per_s=_PACE_PER_S)
        )
        nbytes = sum(path.stat().st_size for path in place.iterdir())
        began = time.perf_counter()
        state = read_content(read_history(place)).state
        facts["replayed_per_s"] = state.next_uid / (time.perf_counter() - began)
    facts["nbytes_per_trajectory"] = nbytes / state.next_uid
    facts["paced_blocked_max_ms"] = paced["blocked_max_ms"]
    facts["idle_blocked_max_ms"] = idle_s * 1e3
    return {key: round(value, 2) for key, value in facts.items()}


async def _idle() -> float:
    """How late the ticker is at worst with nothing else on the loop."""
    late_s: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        ticker = tasks.create_task(_tick(late_s))
        await asyncio.sleep(_PACED_S)
        ticker.cancel()
    return max(late_s)


async def _write(
    folder: Path, num_trajectories: int, pace_per_s: float = math.inf
) -> dict[str, float]:
    progressed = asyncio.Event()
    writer = LedgerWriter(LedgerLog.open(folder, "bench"), on_progress=progressed.set)
    append_max_s = 0.0
    async with writer, asyncio.TaskGroup() as tasks:
        late_s: list[float] = []
        ticker = tasks.create_task(_tick(late_s))
        began, cpu_began = time.perf_counter(), time.process_time()
        writer.append(Version(0, 0))
        for first_uid in range(0, num_trajectories, TICK_SAMPLES):
            for events in trajectories(first_uid):
                before = time.perf_counter()
                writer.append(*events)
                append_max_s = max(append_max_s, time.perf_counter() - before)
                await asyncio.sleep(0)  # an engine's next batch of deltas
            while not writer.has_capacity:
                progressed.clear()
                await asyncio.wait_for(progressed.wait(), _TIMEOUT_S)
            await asyncio.sleep(max(0.0, began + first_uid / pace_per_s - time.perf_counter()))
        await writer.durable(writer.append(Version(1, 0)), _TIMEOUT_S)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        ticker.cancel()
    num_written = -(-num_trajectories // TICK_SAMPLES) * TICK_SAMPLES
    return {
        "trajectories_per_s": num_written / took_s,
        "cpu_us_per_trajectory": cpu_s / num_written * 1e6,
        "blocked_max_ms": max(late_s, default=0.0) * 1e3,
        "append_max_ms": append_max_s * 1e3,
    }


def trajectories(first_uid: int) -> list[list[Event]]:
    """The events of `TICK_SAMPLES` trajectories, in the batches that a manager appends."""
    seeds = np.arange(_GROUP_SIZE, dtype=np.int64)
    groups: list[Event] = [
        Admitted(uid, f"e0/prompt{uid}", f"prompt{uid}", 0, uid, seeds)
        for uid in range(first_uid, first_uid + TICK_SAMPLES, _GROUP_SIZE)
    ]
    uids = np.arange(first_uid, first_uid + TICK_SAMPLES, dtype=np.int64)
    bounds = [_NUM_TOKENS * idx // _NUM_RUNS for idx in range(_NUM_RUNS + 1)]
    runs: list[list[Event]] = [
        [
            Tokens(
                uids,
                np.full(TICK_SAMPLES, start, np.int64),
                np.arange(TICK_SAMPLES + 1, dtype=np.int64) * (stop - start),
                np.zeros(TICK_SAMPLES, np.int64),
                _TOKEN_IDS[TICK_SAMPLES * start : TICK_SAMPLES * stop],
                _LOGPROBS[TICK_SAMPLES * start : TICK_SAMPLES * stop],
            )
        ]
        for start, stop in pairwise(bounds)
    ]
    finish: list[Event] = [
        Finished(uids, ["length"] * TICK_SAMPLES),
        Scored(uids, np.ones(TICK_SAMPLES)),
    ]
    return [[*groups, Started(uids)], *runs, finish]


async def _tick(late_s: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICKER_S)
        late_s.append(time.perf_counter() - before - _TICKER_S)
