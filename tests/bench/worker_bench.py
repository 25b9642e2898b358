"""How many calls of rollout workers one manager makes.

Run by `rollout.py`; as a program, it is one of the processes:

    worker_bench.py workers FOLDER NUM_WORKERS PARENT_PID    simulated workers, which answer at once
    worker_bench.py manager FOLDER NUM_WORKERS METHOD DURATION_S PARENT_PID
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import uvloop
import zmq
from bench_programs import BenchError
from delta_bench import started

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import UmbraError
from umbra.runtime.process.prctl import die_with_parent
from umbra.runtime.rollout.agents.worker_pool import GroupRetries, WorkerJob, WorkerPool
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer

_TIMEOUT_S: Final = 120.0
_GROUP_SIZE: Final = 8
_PROMPT_LEN: Final = 128
_COMPLETION_LEN: Final = 512
_CONCURRENCY: Final = {"score": 4, "run_agent": 32}
_WARM_UP_S: Final = 0.5


def run(num_workers: int, duration_s: float) -> dict[str, float]:
    """One manager's `WorkerPool` with as many calls in progress as the workers take.

    Returns:
        `rewards_per_s` and `rewards_per_cpu_s`: calls that score a group of 8 completions of 512
        tokens, by the clock and by the processor time of the manager's process. `loops_per_s` and
        `loops_per_cpu_s`: starts of an agent loop, without what it generates.
    """
    cores = sorted(os.sched_getaffinity(0))
    facts: dict[str, float] = {}
    for method, name in (("score", "rewards"), ("run_agent", "loops")):
        with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
            workers = ["worker_bench", "workers", folder, str(num_workers)]
            with started([workers], cores[1:] or cores) as (process,):
                assert process.stdout is not None
                process.stdout.readline()
                sizes = [str(num_workers), method, str(duration_s)]
                manager = ["worker_bench", "manager", folder, *sizes]
                with started([manager], cores[:1]) as (process,):
                    output, _ = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode != 0:
            raise BenchError(f"the manager's process ended with status {process.returncode}")
        per_s, per_cpu_s = json.loads(output)
        facts |= {f"{name}_per_s": per_s, f"{name}_per_cpu_s": per_cpu_s}
    return facts


class _SimulatedWorker:
    def score(self, prompts: Any, items: Sequence[Any], manager: str) -> list[float]:
        return [1.0] * len(items)

    def run_agent(self, item: Any, timeout_s: float) -> float:
        return 1.0


async def _serve(folder: Path, num_workers: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with asyncio.TaskGroup() as tasks:
        for idx in range(num_workers):
            server = ActorServer(_SimulatedWorker(), 1)
            server.bind(context.socket(zmq.ROUTER), _ref(f"w{idx}", folder).ipc_endpoint)
            tasks.create_task(server.run())
        print("ready", flush=True)


def _ref(name: str, folder: Path) -> ActorRef:
    return ActorRef(name=name, incarnation=1, node_id="here", ipc_endpoint=f"ipc://{folder}/{name}")


@dataclass(frozen=True)
class _Context:
    """As much of the manager's `ActorContext` as the pool uses; there is no supervisor."""

    client: Client
    folder: Path

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int) -> ActorRef:
        return _ref(name, self.folder)


async def _measure(
    folder: Path, num_workers: int, method: str, duration_s: float
) -> tuple[float, float]:
    num_done = 0
    prompt = Prompt("prompt", "7 " * _PROMPT_LEN, np.ones(1, np.int32), {"answer": "seven"})
    item = {"sample_id": "e0/prompt/0", "tokens": np.arange(_COMPLETION_LEN, dtype=np.int32)}
    arguments: tuple[object, ...]
    if method == "score":
        facts = {"prompt": 0, "num_tokens": _COMPLETION_LEN, "finish_reason": "stop"}
        arguments = [prompt.to_score()], [item | facts] * _GROUP_SIZE, "rollouts"
    else:
        given = {"prompt": prompt.text, "row": prompt.row, "manager": "rollouts", "session": 1}
        arguments = item | given, 600.0

    def on_result(_: Any) -> None:
        nonlocal num_done
        num_done += 1
        pool.put(job)

    job = WorkerJob(
        label="a call",
        group_id="e0/prompt",
        sample_id="e0/prompt/0",
        method=method,
        make_arguments=lambda: arguments,
        timeout_s=_TIMEOUT_S,
        on_result=on_result,
        on_failure=_fail,
        is_active=lambda: True,
        group_retries=GroupRetries(0),
    )
    async with Client("here") as client, asyncio.TaskGroup() as tasks:
        pool = WorkerPool(
            [f"w{idx}" for idx in range(num_workers)],
            cast("ActorContext", _Context(client, folder)),
            concurrency=_CONCURRENCY,
            max_deaths=0,
            on_failure=_fail,
        )
        running = tasks.create_task(pool.run())
        for _ in range(num_workers * _CONCURRENCY[method]):
            pool.put(job)
        await asyncio.sleep(_WARM_UP_S)
        before, began, cpu_began = num_done, time.perf_counter(), time.process_time()
        await asyncio.sleep(duration_s)
        count = num_done - before
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        running.cancel()
    return count / wall_s, count / cpu_s


def _fail(error: UmbraError) -> None:
    raise error


def main() -> None:
    role, folder, num_workers, *arguments, parent = sys.argv[1:]
    die_with_parent(int(parent))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if role == "workers":
            runner.run(_serve(Path(folder), int(num_workers)))
        method, duration_s = arguments
        found = runner.run(_measure(Path(folder), int(num_workers), method, float(duration_s)))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
