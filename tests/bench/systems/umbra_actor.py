"""umbra: a session's actor, called straight from this process over its own socket."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from call_timing import (
    PAYLOAD,
    gathers,
    measure_latency,
    measure_throughput,
    summarise,
    workers,
)
from system_report import Task, descendants_resident_mb, run_program

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cli.umbra_command import umbra_version
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session import Session, SessionConfig

_CALL_TIMEOUT_S = 20.0


async def measure(task: Task) -> dict[str, Any]:
    """The session blocks, so it has a thread; its supervisor belongs to the main thread."""
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        start = time.perf_counter()
        with Session.from_torchrun(SessionConfig(run_dir=Path(folder))) as session:
            entered_s = time.perf_counter() - start
            spec = ActorSpec(
                name="echo", target="bench_echo:Echo", sys_path=(str(Path(__file__).parent),)
            )
            actor = session.spawn(spec)
            actor.call("echo", PAYLOAD, timeout_s=_CALL_TIMEOUT_S)
            facts: dict[str, Any] = {
                "version": umbra_version(),
                "ready_s": round(entered_s, 4),
                "first_call_s": round(time.perf_counter() - start, 4),
                "first_call_from_exec_s": task.since_spawn_s(),
                "resident_mb": descendants_resident_mb(
                    without={actor.call("pid", timeout_s=_CALL_TIMEOUT_S)}
                ),
            }
            if task.duration_s:
                async with Client(actor.ref.node_id) as client:
                    facts |= await _measure_calls(client.handle(actor.ref), task.duration_s)
                facts["session_p50_us"] = _session_latency(actor, task.duration_s)["p50_us"]
    return facts


async def _measure_calls(handle: Handle, duration_s: float) -> dict[str, Any]:
    async def call() -> Any:
        return await handle.call("echo", PAYLOAD, timeout_s=_CALL_TIMEOUT_S)

    async def call_async() -> Any:
        return await handle.call("echo_async", PAYLOAD, timeout_s=_CALL_TIMEOUT_S)

    facts: dict[str, Any] = {}
    facts |= await measure_latency(call, duration_s)
    facts |= await measure_throughput(
        gathers(call, 100, 1000) | workers(call, 256, 1000), duration_s
    )
    latency = await measure_latency(call_async, duration_s)
    throughput = await measure_throughput(
        gathers(call_async, 100, 1000) | workers(call_async, 256, 1000), duration_s
    )
    facts["async_p50_us"] = latency["p50_us"]
    facts["async_p99_us"] = latency["p99_us"]
    facts["async_calls_per_s"] = throughput["calls_per_s"]
    return facts


def _session_latency(actor: SyncHandle, duration_s: float) -> dict[str, float]:
    """The synchronous face, as trainer code sees it: with a hop to the session's thread."""
    samples_s: list[float] = []
    deadline = time.perf_counter() + duration_s
    while time.perf_counter() < deadline:
        before = time.perf_counter()
        actor.call("echo", PAYLOAD, timeout_s=_CALL_TIMEOUT_S)
        samples_s.append(time.perf_counter() - before)
    return summarise(samples_s)


if __name__ == "__main__":
    run_program(measure, loop_factory=uvloop.new_event_loop)
