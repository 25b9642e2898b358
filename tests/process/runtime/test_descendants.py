"""Processes below one of ours, and any others: found, watched, reaped and ended."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from child_processes import *  # noqa: F403 - the fixtures
from child_processes import DEADLINE_S, PROGRAMS, Run, family, read_pids, wait_ended, wait_readable

from umbra.runtime.process import descendants
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.process.process_end import PidWatch

pytestmark = pytest.mark.process


def test_a_daemon_stays_below_its_living_ancestor(run: Run, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe

    async def body() -> None:
        argv = family(write_fd, "daemon")
        async with ChildProcess.spawn("x", argv, pass_fds=[write_fd]) as child:
            daemon = read_pids(read_fd)["daemon"]
            stat = descendants.process_stat(daemon)
            assert stat is not None
            assert stat.parent_pid == child.pid
            assert os.getsid(daemon) != child.pid
        wait_ended({"daemon": daemon})

    run(body())


def test_orphans_of_a_dead_child_are_ended_and_the_living_left_alone() -> None:
    argv = [sys.executable, str(PROGRAMS / "orphan_keeper.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert wait_readable(keeper.stdout.fileno())
        answer = json.loads(keeper.stdout.readline())
        living = answer["families"]["living"]

        assert answer["adopted"] >= 3
        assert answer["survivors"] == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in answer["families"]["dead"].values())
        states = {name: Path(f"/proc/{pid}/stat").read_text() for name, pid in living.items()}
        assert not any(" Z " in state for state in states.values())

        keeper.stdin.close()
        assert wait_readable(keeper.stdout.fileno())
        assert json.loads(keeper.stdout.readline()) == {
            "left": [],
            "status": "ended with unknown status",
        }
        assert not any(Path(f"/proc/{pid}").exists() for pid in living.values())
        assert keeper.wait(DEADLINE_S) == 0


def test_children_are_found_with_and_without_the_kernels_listing(
    stranger: subprocess.Popen[bytes],
) -> None:
    found = descendants.child_pids(os.getpid())

    assert stranger.pid in found
    assert sorted(descendants.scan_child_pids(os.getpid())) == sorted(found)


def test_pythons_resource_tracker_is_no_working_child(stranger: subprocess.Popen[bytes]) -> None:
    code = "print('up', flush=True);from multiprocessing.resource_tracker import main;main(0)"
    tracker = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(tracker, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"  # its command line can be read
        found = descendants.working_child_pids(os.getpid())
        assert process.pid in descendants.child_pids(os.getpid())

    assert stranger.pid in found
    assert process.pid not in found


def test_nobody_waits_for_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    started = time.monotonic()

    descendants.wait_for_exits([process.pid, os.getpid()], 20.0)

    assert time.monotonic() - started < 30.0


def test_descendants_end_at_the_children_to_spare(run: Run, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe

    async def body() -> None:
        argv = family(write_fd, "child", "daemon")
        async with ChildProcess.spawn("x", argv, pass_fds=[write_fd]) as child:
            pids = read_pids(read_fd)
            below = {found.pid for found in descendants.living_descendants(os.getpid())}
            assert below >= set(pids.values())
            spared = descendants.living_descendants(os.getpid(), spared=[child.pid])
            assert not {found.pid for found in spared} & set(pids.values())
            members = descendants.living_descendants(child.pid)
            assert {found.pid for found in members} == {pids["child"], pids["daemon"]}

    run(body())


def test_the_present_time_is_between_the_starts_of_two_processes() -> None:
    ticks: list[int] = []
    for _ in range(2):
        ticks.append(descendants.ticks_now())
        with subprocess.Popen(["sleep", "60"]) as process:
            stat = descendants.process_stat(process.pid)
            process.kill()
        assert stat is not None
        ticks.append(stat.start_ticks)

    assert ticks == sorted(ticks)
    assert ticks[-1] - ticks[0] < DEADLINE_S * os.sysconf("SC_CLK_TCK")


def test_a_strange_process_name_does_not_confuse_the_parser(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 (("
    program.symlink_to("/bin/sleep")

    with subprocess.Popen([program, "60"]) as process:
        stat = descendants.process_stat(process.pid)
        process.kill()

    assert stat is not None
    assert (stat.parent_pid, stat.has_ended) == (os.getpid(), False)
    assert descendants.process_stat(process.pid) is None


def test_a_process_that_gets_no_orphans_refuses_to_end_them() -> None:
    code = "from umbra.runtime.process.orphans import kill_orphans; kill_orphans()"

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 1
    assert (
        "RuntimeError: only a subreaper gets orphans: call prctl.become_subreaper()" in done.stderr
    )


def test_a_process_that_has_ended_and_is_not_reaped_is_ending() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        alive = descendants.process_stat(child.pid)
        child.kill()
        descendants.wait_for_exits([child.pid], DEADLINE_S)
        ended = descendants.process_stat(child.pid)

    assert alive is not None
    assert not alive.is_ending
    assert ended is not None
    assert ended.is_ending


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


@pytest.mark.slow
def test_adopted_processes_are_reaped_and_own_children_keep_their_status() -> None:
    program = Path(__file__).parents[1] / "programs" / "adopting_parent.py"
    done = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )

    before, after, statuses, num_noted = json.loads(done.stdout)
    assert (before, after, num_noted) == (5, 0, 0)
    assert statuses == {
        "subprocess": 3,
        "os.fork": 4,
        "fork": 5,
        "spawn": 5,
        "posix_spawn": 7,
        "asyncio": 6,
    }


PROGRAM: Final = Path(__file__).parents[1] / "programs" / "forking_parent.py"


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["loop", "rank"])
def test_sigterm_to_a_forked_child_ends_the_child_and_only_the_child(parent: str) -> None:
    command = [sys.executable, str(PROGRAM), parent]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    ends, seen_by_parent = json.loads(done.stdout)

    assert ends == {
        "fork": [-15] * 20,
        "spawn": -15,
        "pool": "[1, 2]",
        "executor": "[1, 2]",
        "os.fork": [-15] * 20,
        "program": -15,
        "program with preexec_fn": -15,
    }
    assert seen_by_parent == ["SIGTERM"]  # the one that it sent itself
