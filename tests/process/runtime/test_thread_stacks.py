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
        ctypes.CDLL(None).pause()
hang_in_native_code()
"""
BUSY: Final = """
import copy, threading, time
nested = []
for _ in range(100):
    nested = [nested]
def copy_forever():
    while True:
        copy.deepcopy(nested)
for _ in range(2):
    threading.Thread(target=copy_forever, daemon=True).start()
print("ready", flush=True)
time.sleep(600)
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
ANSWERING_FOR_A_WHILE: Final = """
import time
from umbra.runtime.process.thread_stacks import answering_stack_requests
def wait_for_line():
    print("ready", flush=True)
    input()
with answering_stack_requests(), answering_stack_requests():
    wait_for_line()
print("over", flush=True)
time.sleep(600)
"""
FOREIGN: Final = """
print("ready", flush=True)
import time; time.sleep(600)
"""


@contextmanager
def program(text: str) -> Generator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-c", text], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0) as process:
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


def test_a_process_that_holds_pythons_lock_is_named_and_lives_on() -> None:
    with program(ANSWERING + HANGING.replace("CDLL", "PyDLL")) as process:
        stacks = read_stacks([process.pid])[process.pid]
        while stacks.startswith("Thread"):  # it is still on its way into native code
            stacks = read_stacks([process.pid])[process.pid]

        assert "holds Python's lock" in stacks
        assert process.poll() is None


def test_busy_threads_survive_that_their_stacks_are_read() -> None:
    with program(ANSWERING + BUSY) as process:
        for _ in range(100):
            assert "Thread" in read_stacks([process.pid])[process.pid]
        assert process.poll() is None


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


def test_a_process_that_does_not_answer_is_left_alone() -> None:
    with program(FOREIGN) as process:
        stacks = read_stacks([process.pid])

        assert process.poll() is None

    assert stacks == {process.pid: "[its stacks are unknown: it does not run umbra]"}


def test_a_process_answers_within_the_block_only() -> None:
    with program(ANSWERING_FOR_A_WHILE) as process:
        assert "wait_for_line" in read_stacks([process.pid])[process.pid]
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout is not None
        assert process.stdout.readline() == "over\n"

        assert read_stacks([process.pid])[process.pid].startswith("[its stacks are unknown")


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return children.read().split()
