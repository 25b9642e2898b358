"""Ledgers of processes that are killed at any moment, and of full disks."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_job import LENGTH, token_of
from ledger_samples import versions_in

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Recorded, Tokens, Version
from umbra.runtime.rollout.ledger.ledger_history import ledger_folder, read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_replay import replay
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter
from umbra.runtime.rollout.ledger.sample_accounts import SampleState

HERE = Path(__file__).parent
SEED = 20_260_801


def run_and_kill(program: str, *arguments: object, after_s: float | None) -> list[str]:
    """The program's output until it was killed, `after_s` after its first line; None: its end."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            if after_s is not None:
                time.sleep(after_s)
                process.kill()
            rest, _ = process.communicate(timeout=110)
        finally:
            process.kill()
    assert first, f"{program} said nothing"
    said = first + rest
    return said[: said.rfind("\n") + 1].splitlines()  # the last line may be torn


@pytest.mark.process
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
def test_every_sample_is_trained_once_or_dropped_however_often_the_job_is_killed(
    tmp_path: Path,
) -> None:
    rng = random.Random(SEED)
    for seed in range(6):
        run_and_kill("ledger_job.py", tmp_path, 10_000, seed, after_s=rng.uniform(0.0, 0.4))
    reached = json.loads((tmp_path / "checkpoint.json").read_text())["step"]
    said = run_and_kill("ledger_job.py", tmp_path, reached + 10, 99, after_s=None)
    assert said[-1] == str(reached + 10)

    trained: dict[int, int] = {}
    folder = ledger_folder(tmp_path, "m")
    state = replay(
        read_history(folder).entries,
        on_settled=lambda group: trained.update(
            {s.uid: s.step or 0 for s in group.samples if s.state is SampleState.TRAINED}
        ),
    )
    state.check_integrity()
    saved = json.loads((tmp_path / "checkpoint.json").read_text())
    assert trained == {int(uid): step for uid, step in saved["trained"].items()}
    assert sorted(set(trained.values())) == list(range(reached + 10))
    assert state.counts[SampleState.LEASED] == 0
    assert state.totals.restores >= 5
    assert state.totals.interruptions > 0
    check_tokens(folder)


def check_tokens(folder: Path) -> None:
    """Each token is the one for its position: none lost, none twice."""
    num_tokens = 0
    for entry in read_history(folder).entries():
        for event in entry.batch.events:
            if isinstance(event, Tokens):
                uid, start = int(event.uids[0]), int(event.starts[0])
                assert start + len(event.tokens) <= LENGTH
                expected = [token_of(uid, start + i) for i in range(len(event.tokens))]
                assert event.tokens.tolist() == expected
                num_tokens += len(event.tokens)
    assert num_tokens > 100


@pytest.mark.process
def test_a_file_that_may_not_grow_ends_the_writer_and_keeps_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    said = run_and_kill("ledger_appender.py", tmp_path, 20_000, after_s=None)

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
