"""A pidfd reports the end of any process."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from child_processes import *  # noqa: F403 - the fixtures
from child_processes import DEADLINE_S, Run

from umbra.runtime.process.process_end import PidWatch

pytestmark = pytest.mark.process


def test_a_watch_reports_the_end_of_any_process(
    run: Run, stranger: subprocess.Popen[bytes]
) -> None:
    async def body() -> None:
        ended = asyncio.Event()
        with PidWatch(stranger.pid, ended.set):
            stranger.kill()
            await ended.wait()

    run(body())
    stranger.wait(DEADLINE_S)


def test_a_watch_of_an_ended_process_calls_back_at_once(
    run: Run, stranger: subprocess.Popen[bytes]
) -> None:
    stranger.kill()
    stranger.wait(DEADLINE_S)

    async def body() -> None:
        ended = asyncio.Event()
        with PidWatch(stranger.pid, ended.set):
            await ended.wait()

    run(body())


def test_a_closed_watch_is_silent(run: Run, stranger: subprocess.Popen[bytes]) -> None:
    async def body() -> None:
        calls: list[str] = []
        last = asyncio.Event()
        with PidWatch(stranger.pid, lambda: calls.append("closed")):
            pass
        with PidWatch(stranger.pid, last.set):
            stranger.kill()
            await last.wait()
        assert calls == []

    run(body())


def test_a_parent_other_than_expected_counts_as_ended(run: Run) -> None:
    async def body() -> None:
        ended = asyncio.Event()
        with PidWatch.of_parent(os.getpid(), ended.set):
            await ended.wait()
        with PidWatch.of_parent(os.getppid(), ended.clear):
            assert ended.is_set()

    run(body())
