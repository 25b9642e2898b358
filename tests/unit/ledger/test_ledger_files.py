"""A ledger's files: incarnations, parts, torn ends, damage, and writers that wake up late."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_replay import replay
from ledger_samples import events_in, life_of_a_group, versions_in, wire, write_events

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Version, encode_batches
from umbra.runtime.rollout.ledger.ledger_history import (
    Position,
    header_of,
    ledger_folder,
    managers_of,
    read_history,
)
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog


def write_life(folder: Path, *versions: int, part_nbytes: int = 10**6) -> None:
    with LedgerLog.open(folder, "job", part_nbytes=part_nbytes) as log:
        write_events(log, *[[Version(version, version)] for version in versions])


def test_events_of_all_incarnations_come_back_in_order(tmp_path: Path) -> None:
    first, second = life_of_a_group(0, "a", 0, 0), life_of_a_group(2, "b", 1, 0)
    with LedgerLog.open(tmp_path / "m", "job-1") as log:
        write_events(log, [Version(0, 0)], first)
    with LedgerLog.open(tmp_path / "m", "job-2") as log:
        before = events_in(log.history)
        write_events(log, second)

    history = read_history(tmp_path / "m")

    assert before == [wire(event) for event in [Version(0, 0), *first]]
    assert events_in(history) == [*before, *map(wire, second)]
    headers = [header_of(part.path) for part in history.parts]
    assert [(header.incarnation, header.job_id) for header in headers] == [
        (1, "job-1"),
        (2, "job-2"),
    ]
    assert [entry.batch.time_s for entry in history.entries()] == [10, 11, 10]


def test_ledgers_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path) -> None:
    assert managers_of(tmp_path) == []

    (tmp_path / "ledger").symlink_to("ledger")  # a loop, which nobody can read, not even root
    with pytest.raises(OSError, match="symbolic links"):
        managers_of(tmp_path)


def test_parts_rotate_and_are_read_as_one(tmp_path: Path) -> None:
    write_life(tmp_path, *range(50), part_nbytes=300)
    write_life(tmp_path, 50, 51)

    history = read_history(tmp_path)

    assert versions_in(tmp_path) == list(range(52))
    assert len({part.part for part in history.parts if part.incarnation == 1}) > 3
    assert [header_of(part.path).part for part in history.parts] == [
        part.part for part in history.parts
    ]


def test_positions_order_and_survive_as_text(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job", part_nbytes=150) as log:
        found = write_events(log, *[[Version(version, 0)] for version in range(9)])
    with LedgerLog.open(tmp_path, "job") as log:
        found += write_events(log, [Version(9, 0)])
        history = log.history

    assert found == sorted(set(found))
    assert [Position.parse(str(position)) for position in found] == found
    assert Position(2, 0, 5) > Position(1, 7, 900)
    assert all(history.covers(position) for position in found[:-1])
    assert not history.covers(found[-1])
    assert read_history(tmp_path).end == found[-1]
    with pytest.raises(LedgerError, match="'1-2' is not a ledger position"):
        Position.parse("1-2")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_torn_end_loses_the_last_flush_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    with LedgerLog.open(folder, "job") as log:
        ends = [0, *[end.offset for end in write_events(log, *[[Version(v, 0)] for v in range(4)])]]
    path = folder / "000001-0000.log"
    length = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, length)
    kept = sum(0 < end <= length for end in ends)

    assert versions_in(folder) == list(range(kept))
    write_life(folder, 7)
    assert versions_in(folder) == [*range(kept), 7]
    assert path.stat().st_size == length


def test_a_writer_that_wakes_late_changes_nothing(tmp_path: Path) -> None:
    old = LedgerLog.open(tmp_path, "job", part_nbytes=150)
    write_events(old, [Version(0, 0)])
    new = LedgerLog.open(tmp_path, "job")

    with pytest.raises(LedgerError, match="incarnation 2 of this ledger has begun"):
        write_events(old, [Version(666, 0)])
    with pytest.raises(LedgerError, match="incarnation 2 of this ledger has begun"):
        write_events(old, [Version(667, 0)])
    write_events(new, [Version(1, 0)])

    assert (tmp_path / "000001-0000.log").stat().st_size > read_history(tmp_path).parts[0].stop
    assert versions_in(tmp_path) == [0, 1]
    new.close()
    old.close()
    write_life(tmp_path, 2)
    assert versions_in(tmp_path) == [0, 1, 2]


def test_parts_that_an_old_incarnation_begins_late_do_not_count(tmp_path: Path) -> None:
    old = LedgerLog.open(tmp_path, "job", part_nbytes=1)
    write_life(tmp_path, 1)

    with pytest.raises(LedgerError, match="has begun"):
        write_events(old, [Version(666, 0)])

    old.close()
    assert (tmp_path / "000001-0001.log").exists()
    assert versions_in(tmp_path) == [1]


def test_a_writer_whose_folder_was_moved_stays_out_of_the_ledger_that_has_its_path(
    tmp_path: Path,
) -> None:
    folder, moved = tmp_path / "ledger", tmp_path / "replaced"
    old = LedgerLog.open(folder, "job", part_nbytes=1)
    write_events(old, [Version(0, 0)])
    folder.rename(moved)
    write_life(folder, 1)

    write_events(old, [Version(666, 0)])
    old.close()

    assert versions_in(moved) == [0, 666]
    write_life(folder, 2)
    assert versions_in(folder) == [1, 2]


@pytest.mark.parametrize(
    ("part_nbytes", "cause"),
    [
        (1 << 20, r"000001-0000\.log: it was removed while this run .*run\.resume=PATH"),
        (1, r"No such file or directory; it was removed, or its file system is no longer mounted"),
    ],
    ids=["same file", "next file"],
)
def test_a_writer_whose_file_was_removed_acknowledges_nothing_more(
    tmp_path: Path, part_nbytes: int, cause: str
) -> None:
    folder = tmp_path / "ledger"
    with LedgerLog.open(folder, "job", part_nbytes=part_nbytes) as log:
        write_events(log, [Version(0, 0)])
        shutil.rmtree(folder)

        with pytest.raises(LedgerError, match=cause):
            write_events(log, [Version(1, 0)])


def test_an_incarnation_that_died_before_its_header_takes_nothing_with_it(tmp_path: Path) -> None:
    write_life(tmp_path, 0, 1)
    (tmp_path / "000002-0000.log").write_bytes(b"")
    assert versions_in(tmp_path) == [0, 1]
    write_life(tmp_path, 2)
    (tmp_path / "000004-0000.log").write_bytes((tmp_path / "000003-0000.log").read_bytes()[:30])

    assert versions_in(tmp_path) == [0, 1, 2]
    write_life(tmp_path, 3)
    assert versions_in(tmp_path) == [0, 1, 2, 3]
    assert [part.incarnation for part in read_history(tmp_path).parts] == [1, 3, 5]


def test_reading_while_a_writer_is_active(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Version(0, 0)])
        found = read_history(tmp_path)
        write_events(log, [Version(1, 0)])

        assert events_in(found) == [wire(Version(0, 0))]
        assert versions_in(tmp_path) == [0, 1]


def damage(folder: Path) -> None:
    path = folder / "000001-0000.log"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def shorten(folder: Path) -> None:
    os.truncate(folder / "000001-0001.log", 150)


def remove_a_file(folder: Path) -> None:
    (folder / "000001-0001.log").unlink()


def swap_files(folder: Path) -> None:
    (folder / "000001-0000.log").rename(folder / "x")
    (folder / "000001-0001.log").rename(folder / "000001-0000.log")
    (folder / "x").rename(folder / "000001-0001.log")


@pytest.mark.parametrize("lives", [1, 2])
@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (damage, r"000001-0000.log: the frame at byte \d+ is damaged.*backup"),
        (shorten, r"000001-0001.log is damaged.*backup"),
        (remove_a_file, r"000001-0001.log( is missing.*backup|: No such file)"),
        (swap_files, r"000001-000\d.log was written as"),
    ],
)
def test_damage_is_refused_with_its_position(
    tmp_path: Path, harm: Callable[[Path], None], complaint: str, lives: int
) -> None:
    write_life(tmp_path, *range(40), part_nbytes=200)
    if lives == 2:
        write_life(tmp_path, 40)
    assert (tmp_path / "000001-0002.log").exists()
    harm(tmp_path)

    with pytest.raises(LedgerError, match=complaint):
        list(read_history(tmp_path).entries())


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbra.runtime.rollout.ledger.ledger_history.FORMAT", 1)
    write_life(tmp_path, 0)
    monkeypatch.undo()

    with pytest.raises(LedgerError, match="has format 1, and this umbra reads format 2"):
        read_history(tmp_path)


def test_a_contradiction_is_named_with_its_position(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job") as log:
        positions = write_events(log, [Version(0, 0)], [Version(0, 0)])

    with pytest.raises(LedgerError, match=f"the ledger at {positions[0]}: version 0 follows"):
        replay(read_history(tmp_path).entries)


def test_a_failed_write_is_final_and_nothing_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LedgerLog.open(tmp_path, "job") as log:
        (end,) = write_events(log, [Version(0, 0)])
        num_calls = 0

        def some(descriptor: int, pieces: Sequence[bytes]) -> int:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 3:
                raise OSError(28, "No space left on device")
            return os.write(descriptor, b"".join(pieces)[:7])

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", some)
            with pytest.raises(LedgerError, match=r"000001-0000.log: the disk is full"):
                write_events(log, [Version(1, 0)])
        with pytest.raises(LedgerError, match="the disk is full"):
            log.write(encode_batches(0.0, [Version(2, 0)]))

    assert (tmp_path / "000001-0000.log").stat().st_size == end.offset + 3 * 7
    assert read_history(tmp_path).end == end
    write_life(tmp_path, 3)
    assert versions_in(tmp_path) == [0, 3]


def test_a_frame_written_in_small_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(descriptor: int, pieces: Sequence[bytes]) -> int:
        return os.write(descriptor, b"".join(pieces)[:7])

    monkeypatch.setattr(os, "writev", some)
    with LedgerLog.open(tmp_path, "job") as log:
        log.write([wire(Version(version, 0)) for version in range(2000)])

    assert versions_in(tmp_path) == list(range(2000))


def test_managers_of_a_run(tmp_path: Path) -> None:
    assert managers_of(tmp_path) == []
    write_life(ledger_folder(tmp_path, "rollouts-1"), 0)
    write_life(ledger_folder(tmp_path, "rollouts-0"), 0)

    assert managers_of(tmp_path) == ["rollouts-0", "rollouts-1"]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("in the way")

    with pytest.raises(LedgerError, match=rf"cannot write to {tmp_path}/ledger/m"):
        LedgerLog.open(tmp_path / "ledger" / "m", "job")
