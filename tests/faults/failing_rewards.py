"""Reward functions as users write them, on bad days."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

Column = list[Any]


def zero(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    return [0.0 for _ in completions]


def raises(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    raise ValueError("no digit in the completion")


def returns_nan(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    return [math.nan for _ in completions]


def one_too_few(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    return [0.0 for _ in completions[1:]]


def needs_solution(prompts: list[str], completions: list[str], *, solution: Column) -> list[float]:
    """Wants a column that the data set does not have."""
    return [0.0 for _ in solution]


def exits(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    """Ends the worker's process without a word, as a crash in native code does."""
    os._exit(3)


def leaves_a_daemon(prompts: list[str], completions: list[str], **columns: Column) -> list[float]:
    """Starts a daemon once: double fork, a session of its own, an empty environment.

    Its pid is written to the file that DAEMON_PID_FILE names.
    """
    path = os.environ["DAEMON_PID_FILE"]
    if not os.path.exists(path):
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork() == 0:
                with open(f"{path}.new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(f"{path}.new", path)
                pause = "import signal; signal.pause()"
                os.execve(sys.executable, [sys.executable, "-ISc", pause], {})
            os._exit(0)
        os.waitpid(middle, 0)
    return zero(prompts, completions)
