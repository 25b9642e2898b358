"""Xoscar: a stateless actor in the one sub-process of a local pool."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from importlib.metadata import version
from typing import Any

from call_timing import (
    PAYLOAD,
    Batch,
    gathers,
    measure_latency,
    measure_throughput,
    workers,
)
from system_report import Task, descendants_resident_mb, run_program


def _make_echo_class(xoscar: Any) -> type:
    async def echo(self: object, value: bytes) -> bytes:
        del self
        return value

    async def pid(self: object) -> int:
        del self
        return os.getpid()

    members = {"echo": xoscar.extensible(echo), "pid": pid}
    return type("Echo", (xoscar.StatelessActor,), members)


async def measure(task: Task) -> dict[str, Any]:
    start = time.perf_counter()
    xoscar: Any = importlib.import_module("xoscar")
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    ready_s = time.perf_counter() - start
    try:
        (address,) = pool.sub_processes
        actor = await xoscar.create_actor(_make_echo_class(xoscar), address=address, uid="echo")
        await actor.echo(PAYLOAD)
        facts: dict[str, Any] = {
            "version": version("xoscar"),
            "ready_s": round(ready_s, 4),
            "first_call_s": round(time.perf_counter() - start, 4),
            "first_call_from_exec_s": task.since_spawn_s(),
            "resident_mb": descendants_resident_mb(without={await actor.pid()}),
        }
        if task.duration_s:
            facts |= await _measure_calls(actor, task.duration_s)
    finally:
        async with asyncio.timeout(10.0):
            await pool.stop()
    return facts


async def _measure_calls(actor: Any, duration_s: float) -> dict[str, Any]:
    async def call() -> Any:
        return await actor.echo(PAYLOAD)

    def batches_of(width: int) -> Batch:
        async def batch(num_calls: int) -> int:
            num_waves = -(-num_calls // width)
            for _ in range(num_waves):
                await actor.echo.batch(*[actor.echo.delay(PAYLOAD) for _ in range(width)])
            return num_waves * width

        return batch

    facts: dict[str, Any] = {}
    facts |= await measure_latency(call, duration_s)
    facts |= await measure_throughput(gathers(call, 100, 1000) | workers(call, 256), duration_s)
    # Xoscar's own way of many calls at once: one message, one answer, one outcome for all.
    batches = {f"batch of {width}": batches_of(width) for width in (100, 1000)}
    throughput = await measure_throughput(batches, duration_s)
    facts["batch_calls_per_s"] = throughput["calls_per_s"]
    return facts


if __name__ == "__main__":
    run_program(measure)
