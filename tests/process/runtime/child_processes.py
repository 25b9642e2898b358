"""Children for tests of processes: programs, fixtures, and waits with a deadline."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from umbra.runtime.process.child_process import living_pids

PROGRAMS = Path(__file__).parent.parent / "programs"
DEADLINE_S = 60.0
SLEEP = [sys.executable, "-ISc", "import signal; signal.pause()"]
Run = Callable[[Coroutine[Any, Any, None]], None]


def python(code: str) -> list[str]:
    return [sys.executable, "-ISc", code]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine within the deadline, on the standard loop and on the supervisor's."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_within_deadline(body: Coroutine[Any, Any, None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await body

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(limited())
        assert not living_pids()

    return run_within_deadline


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end): what a child reports on."""
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def read_pids(read_fd: int) -> dict[str, int]:
    """The report of family.py."""
    assert wait_readable(read_fd)
    pids: dict[str, int] = json.loads(os.read(read_fd, 4096))
    return pids


def wait_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(DEADLINE_S * 1000))


def wait_ended(pids: dict[str, int]) -> None:
    """Every one of `pids` ends within the deadline."""
    for name, pid in pids.items():
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert wait_readable(pidfd), f"{name} ({pid}) still runs"
        finally:
            os.close(pidfd)


def family(report_fd: int, *members: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / "family.py"), str(report_fd), *members]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ChildProcess knows nothing of."""
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()
