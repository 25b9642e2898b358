"""Forks children in every usual way while it handles SIGTERM, and ends them by SIGTERM.

    python forking_parent.py loop | rank

Prints a line of JSON: the exit status of each child, and the signals that the parent itself saw.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal

import uvloop

from umbra.runtime.process.signal_handling import handle_signals
from umbra.trainer.world.signals import StopSignals


def process(method: Literal["fork", "spawn"]) -> int | None:
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    return int(child.exitcode)


def pool() -> str:
    with multiprocessing.get_context("fork").Pool(2) as workers:
        result = repr(workers.map(abs, [-1, 2]))
    workers.join()
    return result


def executor() -> str:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as workers:
        return repr(list(workers.map(abs, [-1, 2])))


def raw_fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def program(preexec_fn: Callable[[], object] | None = None) -> int:
    with subprocess.Popen(["sleep", "60"], preexec_fn=preexec_fn) as child:
        child.terminate()
    return child.returncode


def ends_of_children() -> dict[str, object]:
    return {
        "fork": [process("fork") for _ in range(20)],
        "spawn": process("spawn"),
        "pool": pool(),
        "executor": executor(),
        "os.fork": [raw_fork() for _ in range(20)],
        "program": program(),
        "program with preexec_fn": program(preexec_fn=os.getpid),
    }


async def on_a_loop() -> tuple[dict[str, object], list[str]]:
    seen: list[str] = []
    arrived = asyncio.Event()

    def see(number: signal.Signals) -> None:
        seen.append(number.name)
        arrived.set()

    handle_signals([signal.SIGTERM], see)
    ends = await asyncio.to_thread(ends_of_children)
    os.kill(os.getpid(), signal.SIGTERM)  # its own arrive
    await arrived.wait()
    return ends, seen


def as_a_rank() -> tuple[dict[str, object], list[str]]:
    with StopSignals(grace_s=60) as stop:
        stop.defer()
        ends = ends_of_children()
        seen = [stop.name] if stop.requested else []
        os.kill(os.getpid(), signal.SIGTERM)
        stop.disarm()
        daemon = os.fork()  # holds what the parent closes, for longer than the block
        if daemon == 0:
            time.sleep(60)
            os._exit(0)
    os.kill(daemon, signal.SIGKILL)
    os.waitpid(daemon, 0)
    return ends, [*seen, stop.name]


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(on_a_loop())
    else:
        outcome = as_a_rank()
    print(json.dumps(outcome))
