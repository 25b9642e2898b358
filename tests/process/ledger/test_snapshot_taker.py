"""The process that takes snapshots while a manager appends."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from pathlib import Path

import pytest
from ledger_replay import replay
from ledger_samples import life_of_a_group, wire_of, write_events

from umbra.runtime.errors import LedgerError, UmbraError
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.process.process_end import PidWatch
from umbra.runtime.rollout.ledger import ledger_snapshot
from umbra.runtime.rollout.ledger.index_part import IndexPart
from umbra.runtime.rollout.ledger.ledger_events import Checkpoint, Event, Recorded, Version
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_snapshot import read_content, snapshots_of
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.ledger.snapshot_taker import SnapshotProcess, SnapshotTaker

pytestmark = pytest.mark.process


async def append(folder: Path, taker: SnapshotTaker, *batches: list[Event]) -> None:
    """Appends, and has snapshots taken that are due."""
    async with taker, LedgerWriter(LedgerLog.open(folder, "job")) as writer:
        for batch in batches:
            ticket = writer.append(*batch)
            await writer.durable(ticket, 10.0)
            steps = sum(isinstance(event, Version) for event in batch)
            taker.observe(writer.position, writer.written_nbytes, steps)
            await taker.take_if_due()


PAGE: list[Event] = [Recorded(0, "a", random.randbytes(60_000))]


def test_one_is_taken_when_the_tail_is_long_and_an_index_with_it(tmp_path: Path) -> None:
    taker = SnapshotTaker(tmp_path)
    taker.tail_nbytes = 100_000
    group = life_of_a_group(0, "a", 0, 0)

    asyncio.run(append(tmp_path, taker, [Version(0, 0), *group[:2]], PAGE))
    assert snapshots_of(read_history(tmp_path)) == []
    asyncio.run(append(tmp_path, taker, [Recorded(0, "b", random.randbytes(110_000))], group[2:]))

    history = read_history(tmp_path)
    (snapshot,) = snapshots_of(history)
    assert snapshot.path.stat().st_size > 170_000
    assert taker.tail_nbytes == 2 * snapshot.path.stat().st_size
    assert history.nbytes_after(snapshot.position) < 1000
    assert wire_of(read_content(history).state) == wire_of(replay(history.entries))
    *earlier, last = history.parts
    index = IndexPart.read(last, sum(part.stop for part in earlier))
    assert last.stop - index.facts.nbytes < 1000


def fail(error: UmbraError) -> None:
    raise error


def test_new_groups_wait_for_a_snapshot_while_several_more_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotTaker, "tail_steps", 1)

    async def scenario() -> None:
        async with Recorder(tmp_path, fail) as recorder, asyncio.TaskGroup() as tasks:
            await recorder.recover(None)
            taking = tasks.create_task(recorder.run())
            for step in (1, 4):
                recorder.version(step, step)
                await recorder.durable()
                assert recorder.has_capacity
                await asyncio.sleep(0)  # the first step is due, and its process begins
            recorder.version(5, 5)
            await recorder.durable()
            assert not recorder.has_capacity
            resumed = asyncio.Event()
            recorder.on_capacity(resumed.set)
            await asyncio.wait_for(resumed.wait(), 60.0)
            assert recorder.has_capacity
            assert snapshots_of(read_history(tmp_path))
            taking.cancel()

    asyncio.run(scenario())


def test_what_leaves_the_window_is_removed_once_snapshots_are_past_it(tmp_path: Path) -> None:
    for step in range(4):
        taker = SnapshotTaker(tmp_path, keep_nbytes=300)
        taker.tail_nbytes, taker.checkpoints = 1, [step]
        events: list[Event] = [
            Version(step, step),
            *life_of_a_group(2 * step, f"p{step}", step, step),
        ]
        asyncio.run(append(tmp_path, taker, events, [Checkpoint(step, step)]))

    history = read_history(tmp_path)

    assert not history.parts[0].path.exists()
    assert all(part.path.exists() for part in history.parts[-2:])
    oldest = min(snapshot.position for snapshot in snapshots_of(history))
    assert history.header_at(oldest)
    assert read_content(history).state.next_uid == 8
    index = LedgerIndex(tmp_path)
    assert [row.uid for row in index.newest(None)[0]] == [*range(7, -1, -1)]
    assert index.digest(index.of_step(0)[0]) is not None
    reason = (
        r"was removed, because rollout\.ledger_gb limits .*run\.resume=never run\.overwrite=true"
    )
    with pytest.raises(LedgerError, match=reason):
        read_content(history, 0)


def test_as_many_parts_leave_as_were_written_since_the_last_snapshot(tmp_path: Path) -> None:
    process = SnapshotProcess(tmp_path, 0)
    with LedgerLog.open(tmp_path, "job", part_nbytes=1) as log:
        for step in range(30):
            group = life_of_a_group(2 * step, f"p{step}", step, step)
            write_events(log, [Version(step, step)], group)
            if step in (0, 9, 29):
                process.take(read_history(tmp_path).end, [step])

    history = read_history(tmp_path)
    oldest = min(snapshot.position for snapshot in snapshots_of(history))
    left = [part for part in history.parts if part.path.exists()]
    assert len(history.parts) >= 60
    assert (left[0].incarnation, left[0].part) == oldest[:2]
    assert read_content(history).state.next_uid == 60


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_snapshot_is_the_same_whether_the_process_has_taken_others(
    tmp_path: Path, num_before: int
) -> None:
    process = SnapshotProcess(tmp_path, math.inf)
    with LedgerLog.open(tmp_path, "job") as log:
        for step in range(5):
            group = life_of_a_group(2 * step, f"p{step}", step, 0)
            write_events(log, [Version(step, step)], group)
            if step >= 3 - num_before:
                process.take(read_history(tmp_path).end, None)
    history = read_history(tmp_path)
    (path, *_) = [snapshot.path for snapshot in snapshots_of(history)]
    taken = path.read_bytes()
    for snapshot in snapshots_of(history):
        snapshot.path.unlink()

    SnapshotProcess(tmp_path, math.inf).take(history.end, None)

    assert path.read_bytes() == taken


def test_a_snapshot_that_the_disk_damages_does_not_reach_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage_the_newest(folder: Path) -> None:
        (path, *_) = [snapshot.path for snapshot in snapshots_of(read_history(folder))]
        if path.stem.endswith("-2"):
            path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(ledger_snapshot, "sync", damage_the_newest)
    process = SnapshotProcess(tmp_path, math.inf)
    with LedgerLog.open(tmp_path, "job") as log:
        for step in range(5):
            group = life_of_a_group(2 * step, f"p{step}", step, 0)
            write_events(log, [Version(step, step)], group)
            process.take(read_history(tmp_path).end, None)

    history = read_history(tmp_path)
    content = read_content(history)
    assert content.snapshot == snapshots_of(history)[0]
    assert wire_of(content.state) == wire_of(replay(history.entries))


def test_a_process_that_was_killed_has_a_successor(tmp_path: Path) -> None:
    async def scenario() -> None:
        others = set(child_pids(os.getpid()))
        async with (
            SnapshotTaker(tmp_path) as taker,
            LedgerWriter(LedgerLog.open(tmp_path, "j")) as w,
        ):
            taker.tail_steps = 1
            for step in range(1, 4):
                await w.durable(w.append(Version(step, step)), 10.0)
                taker.observe(w.position, 0, step)
                await taker.take_if_due()
                (pid,) = set(child_pids(os.getpid())) - others
                died = asyncio.Event()
                with PidWatch(pid, died.set):
                    os.kill(pid, signal.SIGKILL)
                    await asyncio.wait_for(died.wait(), 30.0)

    asyncio.run(scenario())

    steps_done = [snapshot.steps_done for snapshot in snapshots_of(read_history(tmp_path))]
    assert steps_done == [3, 2]


def test_one_that_fails_is_logged_and_the_next_one_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    taker = SnapshotTaker(tmp_path / "elsewhere")
    taker.tail_nbytes = 50_000
    (tmp_path / "elsewhere").mkdir()
    group = life_of_a_group(0, "a", 0, 0)

    asyncio.run(append(tmp_path / "m", taker, [Version(0, 0), *group[:2]], PAGE))

    assert "exited with status 1" in caplog.text
    assert "the log ends at 0-0-0" in capfd.readouterr().err
