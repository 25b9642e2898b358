"""Times one way of calling: sequential calls for latency, many in flight for throughput.

Standard library only: the programs of the peers import it under their own interpreter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

Call = Callable[[], Awaitable[object]]
# Runs that many calls at least, many of them at once; returns how many they were.
Batch = Callable[[int], Awaitable[int]]

PAYLOAD: Final = b"x" * 100
"""The echoed value."""
_NUM_WARM_UP_CALLS: Final = 200
_MIN_LATENCY_CALLS: Final = 100
_TRIAL_SHARE: Final = 0.2
"""Of the time for throughput, spent on each candidate before the best one is measured. Less makes
the choice a matter of luck, more makes the benchmark slow."""


async def measure_latency(call: Call, duration_s: float) -> dict[str, float]:
    """Median and 99th percentile of sequential calls, in microseconds."""
    for _ in range(_NUM_WARM_UP_CALLS):
        await call()
    samples_s: list[float] = []
    deadline = time.perf_counter() + duration_s
    while len(samples_s) < _MIN_LATENCY_CALLS or time.perf_counter() < deadline:
        before = time.perf_counter()
        await call()
        samples_s.append(time.perf_counter() - before)
    return summarise(samples_s)


def summarise(samples_s: list[float]) -> dict[str, float]:
    """`p50_us` and `p99_us` of durations in seconds."""
    ordered = sorted(samples_s)
    return {
        "p50_us": round(ordered[len(ordered) // 2] * 1e6, 1),
        "p99_us": round(ordered[len(ordered) * 99 // 100] * 1e6, 1),
    }


async def measure_throughput(
    candidates: Mapping[str, Batch], duration_s: float
) -> dict[str, float | str]:
    """Calls a second of whichever candidate is fastest here: each system at its best.

    The name of a candidate describes how it keeps calls in flight, such as `gather of 1000`.
    """
    best, best_rate = "", 0.0
    for name, batch in candidates.items():
        rate = await _rate(batch, duration_s * _TRIAL_SHARE)
        if rate > best_rate:
            best, best_rate = name, rate
    rate = await _rate(candidates[best], duration_s)
    return {"calls_per_s": round(rate), "idiom": best}


async def _rate(batch: Batch, duration_s: float) -> float:
    num_calls = 0
    start = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start) < duration_s:
        num_calls += await batch(1)
    return num_calls / elapsed_s


def gathers(call: Call, *widths: int) -> dict[str, Batch]:
    """Candidates that start `width` calls at once and wait for all of them."""

    def of(width: int) -> Batch:
        async def batch(num_calls: int) -> int:
            num_waves = -(-num_calls // width)
            for _ in range(num_waves):
                await asyncio.gather(*[call() for _ in range(width)])
            return num_waves * width

        return batch

    return {f"gather of {width}": of(width) for width in widths}


def workers(call: Call, *widths: int) -> dict[str, Batch]:
    """Candidates in which `width` tasks call one after the other, 20 times each."""

    def of(width: int) -> Batch:
        async def work(num_calls: int) -> None:
            for _ in range(num_calls):
                await call()

        async def batch(num_calls: int) -> int:
            num_each = max(20, -(-num_calls // width))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(width):
                    tasks.create_task(work(num_each))
            return num_each * width

        return batch

    return {f"{width} tasks": of(width) for width in widths}
