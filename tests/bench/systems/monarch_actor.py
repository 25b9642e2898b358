"""Monarch: an asyncio endpoint of one actor in one process of this host's mesh."""

from __future__ import annotations

import getpass
import importlib
import os
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from call_timing import PAYLOAD, gathers, measure_latency, measure_throughput
from system_report import Task, descendants_resident_mb, run_program


async def measure(task: Task) -> dict[str, Any]:
    start = time.perf_counter()
    monarch: Any = importlib.import_module("monarch.actor")
    processes = monarch.this_host().spawn_procs(per_host={"gpus": 1})
    actor = processes.spawn("echo", _make_echo_class(monarch))
    await actor.echo.call_one(PAYLOAD)
    facts: dict[str, Any] = {
        "version": version("torchmonarch"),
        "first_call_s": round(time.perf_counter() - start, 4),
        "first_call_from_exec_s": task.since_spawn_s(),
        "resident_mb": descendants_resident_mb(without={await actor.pid.call_one()}),
    }
    if task.duration_s:

        async def call() -> Any:
            return await actor.echo.call_one(PAYLOAD)

        facts |= await measure_latency(call, task.duration_s)
        facts |= await measure_throughput(gathers(call, 100, 1000), task.duration_s)
    await processes.stop()
    return facts


def _make_echo_class(monarch: Any) -> type:
    async def echo(self: object, value: bytes) -> bytes:
        del self
        return value

    async def pid(self: object) -> int:
        del self
        return os.getpid()

    members = {"echo": monarch.endpoint(echo), "pid": monarch.endpoint(pid)}
    return type("Echo", (monarch.Actor,), members)


if __name__ == "__main__":
    # Monarch logs there, whatever TMPDIR says.
    log_folder = Path("/tmp") / getpass.getuser()
    was_there = log_folder.exists()
    run_program(measure)
    if not was_there:
        shutil.rmtree(log_folder, ignore_errors=True)
