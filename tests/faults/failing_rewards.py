"""Reward functions with the mistakes that users make, and engines that die."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine

Column = list[Any]


def zero(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    return [0.0 for _ in completions]


def raises(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    raise ValueError("no digit in the completion")


def never_returns(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    while True:
        time.sleep(1.0)


async def loop_that_fails_for_3_and_5(ctx: Any, sample: dict[str, Any]) -> float:
    if sample["answer"] in ("3", "5"):
        raise ValueError(f"no tool for {sample['answer']}")
    await ctx.generate(ctx.prompt_tokens)
    return 0.0


def leaves_a_daemon(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    """Starts a daemon once: double fork, a session of its own, an empty environment.

    Once any call has returned, its pid is in the file that DAEMON_PID_FILE names.
    """
    path = os.environ["DAEMON_PID_FILE"]
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # calls may overlap
        if not os.path.exists(path):
            _start_daemon(path)
    return zero(prompts, completions)


def _start_daemon(pid_file: str) -> None:
    """Starts the daemon; returns once its pid is in the file."""
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
            pause = "import signal; signal.pause()"
            os.execve(sys.executable, [sys.executable, "-ISc", pause], {})
        os._exit(0)
    os.close(write_fd)
    os.waitpid(middle, 0)
    os.read(read_fd, 1)  # until the daemon has closed its end, too, by its exec
    os.close(read_fd)


class DiesInStart(EchoEngine):
    """Ends its process, once the ranks compile."""

    def __init__(self, **_: Any) -> None:
        while not os.path.exists(os.environ["COMPILING"]):
            time.sleep(0.02)
        os._exit(6)


class DiesInSync(EchoEngine):
    """Starts, and ends its process whenever it gets weights: a crash in a loop."""

    async def load(self) -> dict[str, int]:
        os._exit(6)
