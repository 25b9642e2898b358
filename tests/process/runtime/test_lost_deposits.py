"""Descriptors of a process that is killed are closed by the server that kept them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from async_tests import on_a_loop

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.image.fd_server import MAX_FDS, received_deposit, serve_fds

PROGRAM = Path(__file__).parents[1] / "programs/depositor.py"
NUM = 2 * MAX_FDS + 7


@contextmanager
def depositor(path: str, name: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that has deposited; it is ended with the block."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), path, name, str(NUM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"deposited\n"
            yield process
        finally:
            process.kill()


def sizes_at(path: str, name: str) -> list[int]:
    sizes: list[int] = []
    for first in range(0, NUM, MAX_FDS):
        with received_deposit(path, name, first, min(MAX_FDS, NUM - first), 5.0) as fds:
            sizes += [os.fstat(fd).st_size for fd in fds]
    return sizes


def await_closed(num_open: int) -> None:
    """Returns when this process has so many descriptors; there is no event for it."""
    deadline = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/fd")) > num_open:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@on_a_loop
async def test_descriptors_of_a_killed_process_are_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async with serve_fds(path) as server, asyncio.timeout(60.0):
        num_before = len(os.listdir("/proc/self/fd"))
        made = depositor(path, "chunks")
        process = await asyncio.to_thread(made.__enter__)
        try:
            assert await asyncio.to_thread(sizes_at, path, "chunks") == list(range(NUM))
        finally:
            process.kill()
            await asyncio.to_thread(made.__exit__, None, None, None)
        await asyncio.to_thread(await_closed, num_before)
        assert server.num_deposited == 0
        with pytest.raises(WeightSyncError, match="no deposited descriptors"):
            await asyncio.to_thread(sizes_at, path, "chunks")
