"""Ray: an asyncio actor on a local cluster without dashboard; also a plain (threadless) actor."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from bench_echo import Echo
from call_timing import (
    PAYLOAD,
    Batch,
    gathers,
    measure_latency,
    measure_throughput,
)
from system_report import Task, descendants_resident_mb, run_program

_TIMEOUT_S = 60.0
_MAX_CONCURRENCY = 1000


class AsyncEcho:
    """Ray runs an actor with any `async def` method on an event loop."""

    async def echo(self, value: bytes) -> bytes:
        return value

    async def pid(self) -> int:
        return os.getpid()


async def measure(task: Task) -> dict[str, Any]:
    # Without it, a message at every start; it changes nothing that is measured here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    start = time.perf_counter()
    ray: Any = importlib.import_module("ray")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ready_s = time.perf_counter() - start
    try:
        actor = ray.remote(AsyncEcho).options(max_concurrency=_MAX_CONCURRENCY).remote()
        ray.get(actor.echo.remote(PAYLOAD), timeout=_TIMEOUT_S)
        facts: dict[str, Any] = {
            "version": ray.__version__,
            "ready_s": round(ready_s, 4),
            "first_call_s": round(time.perf_counter() - start, 4),
            "first_call_from_exec_s": task.since_spawn_s(),
            "resident_mb": descendants_resident_mb(
                without={ray.get(actor.pid.remote(), timeout=_TIMEOUT_S)}
            ),
        }
        if task.duration_s:
            facts |= await _measure_actor(ray, actor.echo.remote, task.duration_s)
            plain = await _measure_actor(
                ray, ray.remote(Echo).remote().echo.remote, task.duration_s
            )
            facts |= {f"sync_actor_{key}": value for key, value in plain.items()}
    finally:
        ray.shutdown()
    return facts


async def _measure_actor(
    ray: Any, remote: Callable[[bytes], Any], duration_s: float
) -> dict[str, Any]:
    async def call() -> Any:
        # Ray's own blocking wait: awaiting the reference instead adds a thread hop.
        return ray.get(remote(PAYLOAD), timeout=_TIMEOUT_S)

    async def call_asyncio() -> Any:
        return await remote(PAYLOAD)

    def get_of(width: int) -> Batch:
        async def batch(num_calls: int) -> int:
            num_waves = -(-num_calls // width)
            for _ in range(num_waves):
                ray.get([remote(PAYLOAD) for _ in range(width)], timeout=_TIMEOUT_S)
            return num_waves * width

        return batch

    candidates = {f"ray.get of {width}": get_of(width) for width in (100, 1000)}
    facts: dict[str, Any] = {}
    facts |= await measure_latency(call, duration_s)
    facts |= await measure_throughput(candidates | gathers(call_asyncio, 500), duration_s)
    return facts


if __name__ == "__main__":
    run_program(measure)
