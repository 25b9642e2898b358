"""Stacks of processes that cannot be asked: in native code, stopped, or foreign."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import pytest

from umbra.runtime.process.thread_stacks import read_stacks

pytestmark = pytest.mark.process

ANSWERING: Final = """
from umbra.runtime.process.thread_stacks import answer_stack_requests
answer_stack_requests()
"""
HANGING: Final = """
import ctypes
def hang_in_native_code():
    print("ready", flush=True)
    while True:
        ctypes.PyDLL(None).pause()  # holds the interpreter's lock
hang_in_native_code()
"""
FORKING: Final = """
import os, time
def wait_forever():
    print("ready", flush=True)
    time.sleep(600)
if os.fork():
    time.sleep(600)
wait_forever()
"""
FOREIGN: Final = """
print("ready", flush=True)
import time; time.sleep(600)
"""


@contextmanager
def program(text: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_process_that_hangs_in_native_code_shows_the_python_that_called_it() -> None:
    with program(ANSWERING + HANGING) as process:
        first = read_stacks([process.pid])[process.pid]
        second = read_stacks([process.pid])[process.pid]

        assert process.poll() is None

    assert "in hang_in_native_code" in first
    assert second.count("in hang_in_native_code") == 1


def test_a_fork_is_told_from_its_parent() -> None:
    with program(ANSWERING + FORKING) as process:
        (child,) = map(int, _children(process.pid))

        stacks = read_stacks([process.pid, child])

    assert "wait_forever" in stacks[child]
    assert "wait_forever" not in stacks[process.pid]


def test_a_stopped_process_is_not_asked() -> None:
    with program(ANSWERING + FOREIGN) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)

        assert read_stacks([process.pid]) == {process.pid: "[it is stopped by a signal]"}


def test_a_process_without_a_handler_is_left_alone() -> None:
    with program(FOREIGN) as process:
        stacks = read_stacks([process.pid])

        assert process.poll() is None

    assert stacks == {process.pid: "[its stacks are unknown: it does not run umbra]"}


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return children.read().split()
