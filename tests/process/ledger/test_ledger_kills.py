"""Ledgers of processes that are killed at any moment, and of full disks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_samples import versions_in, write_events

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Recorded, Version
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter

HERE = Path(__file__).parent
SEED = 20_260_801


@contextmanager
def started(program: str, *arguments: object) -> Generator[subprocess.Popen[str]]:
    """The program's process, which is killed at the end of the block."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def rest_of(process: subprocess.Popen[str]) -> str:
    """What it writes until it ends. `communicate` would lose what `readline` has buffered."""
    assert process.stdout is not None
    return process.stdout.read()


def run_and_kill(program: str, *arguments: object, after_s: float | None) -> list[str]:
    """The program's output until it was killed, `after_s` after its first line; None: its end."""
    with started(program, *arguments) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        if after_s is not None:
            time.sleep(after_s)
            process.kill()
        said = first + rest_of(process)
    assert first, f"{program} said nothing"
    return said[: said.rfind("\n") + 1].splitlines()  # the last line may be torn


@pytest.mark.process
@pytest.mark.slow
def test_what_was_acknowledged_survives_kills_and_the_rest_is_a_prefix(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    found: list[int] = []
    for _ in range(6):
        said = run_and_kill("ledger_appender.py", tmp_path / "m", after_s=rng.uniform(0.0, 0.4))

        found = versions_in(tmp_path / "m")
        assert found == list(range(len(found)))
        assert len(found) > int(said[-1])
    assert len(found) > 50
    assert len(list((tmp_path / "m").iterdir())) >= 6


@pytest.mark.process
@pytest.mark.slow
def test_a_writer_that_is_stopped_and_wakes_after_its_successor_has_begun_does_no_harm(
    tmp_path: Path,
) -> None:
    rng = random.Random(SEED)
    num_late = 0
    for idx in range(8):
        folder = tmp_path / f"m{idx}"
        pause_s = 0.0 if idx % 2 else 0.05  # it is stopped in a write, or before one
        with started("ledger_appender.py", folder, pause_s) as old:
            assert old.stdout is not None
            acknowledged = [int(old.stdout.readline())]
            time.sleep(rng.uniform(0.0, 0.2))
            old.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, old.pid, os.WSTOPPED)
            successor = LedgerLog.open(folder, "job")
            kept = versions_in(folder)
            write_events(successor, [Version(len(kept), 0)])
            old.send_signal(signal.SIGCONT)
            rest = rest_of(old)
        write_events(successor, [Version(len(kept) + 1, 0)])
        successor.close()

        *more, error = rest.splitlines()
        acknowledged += map(int, more)
        assert "incarnation 2 of this ledger has begun" in error
        assert kept == list(range(len(kept)))
        assert len(kept) > max(acknowledged)
        assert versions_in(folder) == list(range(len(kept) + 2))
        last_old = read_history(folder).parts[-2]
        num_late += last_old.path.stat().st_size > last_old.stop
    assert num_late > 0, "the old writer has never written behind what its successor counts"


@pytest.mark.process
def test_a_file_that_may_not_grow_ends_the_writer_and_keeps_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    said = run_and_kill("ledger_appender.py", tmp_path, 0.0, 20_000, after_s=None)

    assert "cannot write" in said[-1]
    assert "ulimit -f" in said[-1]
    found = versions_in(tmp_path)
    assert found == list(range(len(found)))
    assert len(found) > int(said[-2]) > 10
    LedgerLog.open(tmp_path, "job").close()
    assert versions_in(tmp_path) == found


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    return mount_disk("size=1m")


@pytest.mark.process
def test_a_full_disk_keeps_what_was_acknowledged_and_a_new_incarnation_resumes(
    small_disk: Path,
) -> None:
    folder = small_disk / "m"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    acknowledged = -1

    async def fill(first: int, count: int) -> None:
        nonlocal acknowledged
        async with LedgerWriter(LedgerLog.open(folder, "job", part_nbytes=200_000)) as writer:
            for version in range(first, first + count):
                page = Recorded(0, "page", b"x" * 7000)
                await writer.durable(writer.append(Version(version, 0), page), 10.0)
                acknowledged = version

    with pytest.raises(LedgerError, match=r"the disk is full \(.* free on .*/disk\): free"):
        asyncio.run(fill(0, 10**6))
    assert acknowledged > 50
    assert versions_in(folder) == list(range(acknowledged + 1))

    ballast.unlink()
    asyncio.run(fill(acknowledged + 1, 10))
    assert versions_in(folder) == list(range(acknowledged + 1))
