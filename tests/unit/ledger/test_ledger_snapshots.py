"""Snapshots and the log behind them give the state of the whole log, whatever happens to them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_replay import replay
from ledger_samples import admitted, life_of_a_group, runs_of, wire_of, write_events

from umbra.runtime.disk import scratch_path
from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import (
    Checkpoint,
    Dropped,
    Event,
    Leased,
    Recorded,
    Restored,
    Started,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import BEGIN, History, read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_snapshot import (
    first_needed,
    read_content,
    snapshots_of,
    take_snapshot,
)
from umbra.runtime.rollout.ledger.sample_accounts import SampleState


def steps(first: int, last: int) -> Iterator[list[Event]]:
    """One batch of events for each optimizer step, which trains on one group."""
    for step in range(first, last):
        yield [*life_of_a_group(2 * step, str(step), step, step), Version(step + 1, step + 1)]


def open_group(uid: int, version: int) -> list[Event]:
    """A group of which one sample is being generated, and the other one is dropped."""
    return [
        admitted(uid, f"open{uid}"),
        Started(uids_of(uid)),
        runs_of((uid, 0, version, [7, 8])),
        Recorded(uid, "tool", {"answer": [1, b"x"]}),
        Dropped(uids_of(uid + 1), "too old"),
    ]


def begin(folder: Path, num_steps: int) -> None:
    with LedgerLog.open(folder, "job", part_nbytes=1000) as log:
        write_events(log, [Version(0, 0)], *steps(0, num_steps))


def check_state(folder: Path, restoring_step: int | None = None) -> None:
    """A manager reads the same as from the whole log."""
    history = read_history(folder)
    whole = replay(history.entries, restoring_step=restoring_step)
    content = read_content(history, restoring_step)
    if restoring_step is not None:
        for state in (whole, content.state):
            state.apply(Restored(restoring_step, restoring_step))
    content.state.check_integrity()
    assert wire_of(content.state) == wire_of(whole)


def test_only_the_snapshot_and_what_follows_are_read(tmp_path: Path) -> None:
    begin(tmp_path, 9)
    take_snapshot(read_history(tmp_path), None)
    with LedgerLog.open(tmp_path, "job", part_nbytes=1000) as log:
        write_events(log, *steps(9, 12), open_group(24, 12))
    check_state(tmp_path)

    first = tmp_path / "000001-0000.log"
    first.write_bytes(bytes(len(first.read_bytes())))  # it has the same size still
    LedgerLog.open(tmp_path, "job").close()
    content = read_content(read_history(tmp_path))

    assert content.snapshot is not None
    assert content.snapshot.steps_done == 9
    assert content.state.counts[SampleState.TRAINED] == 24
    with pytest.raises(LedgerError, match="is damaged"):
        replay(read_history(tmp_path).entries)


def test_a_snapshot_has_what_is_live_and_no_more_however_long_the_run(tmp_path: Path) -> None:
    begin(tmp_path, 10)
    short = take_snapshot(read_history(tmp_path), None).path.stat().st_size
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, *steps(10, 300))

    long = take_snapshot(read_history(tmp_path), None).path.stat().st_size

    assert long - short < 290 * 17, "16 bytes for each version"
    check_state(tmp_path)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [flip_a_bit, cut, empty, remove])
@pytest.mark.parametrize("num_harmed", [1, 2])
def test_a_damaged_snapshot_means_an_older_one_and_a_longer_tail(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    num_harmed: int,
) -> None:
    for first in (0, 4, 8):
        with LedgerLog.open(tmp_path, "job") as log:
            write_events(log, *([[Version(0, 0)]] if not first else []), *steps(first, first + 4))
        if first < 8:
            take_snapshot(read_history(tmp_path), None)
    newest = snapshots_of(read_history(tmp_path))
    assert [snapshot.steps_done for snapshot in newest] == [8, 4]

    for snapshot in newest[:num_harmed]:
        harm(snapshot.path)

    check_state(tmp_path)
    found = read_content(read_history(tmp_path)).snapshot
    assert (found.steps_done if found else 0) == (4 if num_harmed == 1 else 0)
    is_noticed = f"{newest[0].path} is damaged" in caplog.text
    assert is_noticed or harm is remove


def test_a_snapshot_of_a_log_that_was_replaced_by_a_backup_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(tmp_path / "m", 3)
    shutil.copytree(tmp_path / "m", tmp_path / "backup")
    with LedgerLog.open(tmp_path / "m", "job", clock=lambda: 1.0) as log:
        write_events(log, *steps(3, 6))
    lost = take_snapshot(read_history(tmp_path / "m"), None).path
    with LedgerLog.open(tmp_path / "backup", "job", clock=lambda: 2.0) as log:
        write_events(log, open_group(6, 3), *([Recorded(6, str(k), "x" * 99)] for k in range(9)))
    shutil.copy(lost, tmp_path / "backup")

    assert snapshots_of(read_history(tmp_path / "backup")), "the position is there"
    check_state(tmp_path / "backup")
    assert "of another format or log" in caplog.text


def test_what_a_fenced_manager_wrote_late_is_in_no_state(tmp_path: Path) -> None:
    old = LedgerLog.open(tmp_path, "job")
    write_events(old, [Version(0, 0)], *steps(0, 2))
    new = LedgerLog.open(tmp_path, "job")
    with pytest.raises(LedgerError, match="has begun"):
        write_events(old, *steps(2, 3))
    old.close()
    path = tmp_path / "000001-0000.log"
    late = History(tmp_path, (read_history(tmp_path).parts[0]._replace(stop=path.stat().st_size),))
    taken = take_snapshot(late, None)
    write_events(new, [Version(77, 2)])
    new.close()

    assert taken.path.exists()
    assert snapshots_of(read_history(tmp_path)) == []
    check_state(tmp_path)
    take_snapshot(read_history(tmp_path), None)
    assert not taken.path.exists(), "nothing can need it"


def test_each_checkpoint_that_is_kept_has_a_snapshot_that_serves_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    begin(folder, 0)
    kept: list[int] = []
    for first in range(0, 60, 5):
        with LedgerLog.open(folder, "job") as log:
            write_events(log, *steps(first, first + 5))
            if first % 15 == 10:
                write_events(log, [Checkpoint(first + 5, first + 5)])
                kept = [*kept[-1:], first + 5]
        take_snapshot(read_history(folder), kept)
        for step in kept:
            content = read_content(read_history(folder), step)
            assert content.snapshot is not None
            assert step - content.snapshot.steps_done <= 0
            check_state(folder, step)
    assert kept == [45, 60]
    assert [s.steps_done for s in snapshots_of(read_history(folder))] == [60, 55, 45]


def test_while_the_checkpoints_are_unknown_none_loses_its_snapshot(tmp_path: Path) -> None:
    begin(tmp_path, 0)
    for first in range(0, 30, 5):
        with LedgerLog.open(tmp_path, "job") as log:
            write_events(log, *steps(first, first + 5))
            if first == 10:
                write_events(log, [Checkpoint(15, 15)])
        take_snapshot(read_history(tmp_path), None)

    assert [s.steps_done for s in snapshots_of(read_history(tmp_path))] == [30, 25, 15, 10, 5]


def test_after_a_return_to_a_checkpoint_snapshots_of_the_discarded_steps_do_not_count(
    tmp_path: Path,
) -> None:
    begin(tmp_path, 4)
    take_snapshot(read_history(tmp_path), [4])
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Checkpoint(4, 4)], *steps(4, 7))
    take_snapshot(read_history(tmp_path), [4])
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Restored(4, 4)])
        check_state(tmp_path)
        check_state(tmp_path, 4)
    content = read_content(read_history(tmp_path))
    assert content.snapshot is not None
    assert content.snapshot.steps_done == 4

    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Version(50, 4)])
    take_snapshot(read_history(tmp_path), [4])

    found = snapshots_of(read_history(tmp_path))
    assert [snapshot.steps_done for snapshot in found] == [4, 4]
    check_state(tmp_path, 4)


def test_the_job_goes_back_to_one_checkpoint_twice_with_a_newer_one_between(tmp_path: Path) -> None:
    """The newer checkpoint is then lost or damaged, and the log behind the snapshot has the first
    return, which must not be taken for the second."""
    begin(tmp_path, 4)
    take_snapshot(read_history(tmp_path), [4])
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Checkpoint(4, 4)], *steps(4, 5), [Restored(4, 4)])
    with LedgerLog.open(tmp_path, "job") as log:
        again = [Version(54, 4), Leased(4, uids_of(8, 9)), Version(55, 5), Checkpoint(5, 55)]
        write_events(log, again)

    check_state(tmp_path, 4)
    check_state(tmp_path)


def run_until_call(number: int, function: Callable[[], object]) -> bool:
    """Runs it in a process that dies before its n-th change of the disk; whether it did."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def change_or_die(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == number:
                    os._exit(9)
                return change(*args, **kwargs)

            return change_or_die

        try:
            os.fsync = counted(os.fsync)
            for name in ("replace", "unlink"):
                setattr(Path, name, counted(getattr(Path, name)))
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_crash_between_any_two_writes_leaves_a_state_that_is_right(tmp_path: Path) -> None:
    begin(tmp_path / "m", 0)
    for first in (0, 3, 6):
        with LedgerLog.open(tmp_path / "m", "job") as log:
            write_events(log, *steps(first, first + 3), [Checkpoint(first + 3, first + 3)])
        if first < 6:
            take_snapshot(read_history(tmp_path / "m"), [3, 6])

    number, has_died = 0, True
    while has_died:
        number += 1
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "m", folder)
        history = read_history(folder)
        has_died = run_until_call(number, lambda: take_snapshot(history, [9]))  # noqa: B023
        check_state(folder)
        check_state(folder, 9)
        with LedgerLog.open(folder, "job") as log:
            write_events(log, *steps(9, 10))
        take_snapshot(read_history(folder), [9])
        assert not list(folder.glob(".*")), "what the dead process left"
        found = [snapshot.steps_done for snapshot in snapshots_of(read_history(folder))]
        assert found in ([10, 9], [10, 6])
    assert 4 <= number <= 8


def test_a_checkpoint_that_no_snapshot_serves_needs_the_log_from_its_beginning(
    tmp_path: Path,
) -> None:
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, *[[Version(step, step)] for step in range(3)], [Checkpoint(2, 2)])
    history = read_history(tmp_path)
    snapshot = take_snapshot(history, [2])

    assert first_needed(history, [2, 3]) == snapshot.position
    assert first_needed(history, []) == snapshot.position
    assert first_needed(history, [1, 2]) == BEGIN
    assert first_needed(history, None) == BEGIN


def test_a_snapshot_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Version(0, 0)])
    history = read_history(tmp_path)
    path = take_snapshot(history, None).path
    scratch_path(path).mkdir()

    with pytest.raises(LedgerError, match=rf"cannot write {path}: a folder of that name"):
        take_snapshot(history, None)
