"""The index beside a ledger: it agrees with a naive model, and no state of its files makes it
wrong."""

from __future__ import annotations

import random
import resource
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from ledger_samples import admitted, life_of_a_group, runs_of, write_events
from test_ledger_state import Ledgers

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger import ledger_frames
from umbra.runtime.rollout.ledger.index_part import IndexPart, digest_of
from umbra.runtime.rollout.ledger.ledger_events import (
    Checkpoint,
    Dropped,
    Evaluated,
    Event,
    Finished,
    Leased,
    Restored,
    Scored,
    Started,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import Position, read_history
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.sample_accounts import SampleRow, SampleState


class IndexedLedgers(Ledgers):
    """The same random histories, in small parts and several incarnations, read as they grow."""

    def teardown(self) -> None:
        chance = random.Random(len(self.events))
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "ledger"
            events = list(self.events)
            reader: LedgerIndex | None = None
            while events:
                with LedgerLog.open(
                    folder, "job", part_nbytes=chance.choice([1, 300, 3000])
                ) as log:
                    for _ in range(chance.randint(1, 40)):
                        taken, events = events[:3], events[3:]
                        write_events(log, taken)
                        if reader is None:
                            reader = LedgerIndex(folder)
                        elif chance.random() < 0.1:
                            reader.refresh()
                            reader.write()
                if chance.random() < 0.3:
                    reader = None
            for path in folder.glob("*.index"):
                match chance.randrange(6):
                    case 0:
                        path.unlink()
                    case 1:
                        data = bytearray(path.read_bytes())
                        data[chance.randrange(len(data))] ^= 4
                        path.write_bytes(data)
                    case _:
                        pass
            self.agrees(LedgerIndex(folder))
            if reader is not None:
                reader.refresh()
                self.agrees(reader)

    def agrees(self, index: LedgerIndex) -> None:
        rows = {row.uid: row for row in index.newest(None)[0]}
        assert sorted(rows) == sorted(self.model)
        contents = index.contents([*rows.values()])
        for uid, sample in self.model.items():
            row = rows[uid]
            is_done = sample["step"] is not None and sample["step"] < self.steps
            assert str(row.state) == ("trained" if is_done else sample["state"])
            assert (row.step, row.rolled_back) == (sample["step"], sample["rolled_back"])
            assert row.interruptions == sample["cuts"]
            assert row.state is SampleState.DROPPED or row.reward == sample["reward"]
            versions = [
                version for run in row.runs() for version in [run.version] * (run.stop - run.start)
            ]
            assert versions == [version for _, _, version in sample["tokens"]]
            assert contents[uid].tokens.tolist() == [token for token, *_ in sample["tokens"]]
            assert contents[uid].recorded == sample["once"]
            assert uids([index.find(row.sample_id)]) == [uid]
            story = index.story(row)
            assert story[0]["event"] == "admitted"
            assert sum(told["event"] == "cut" for told in story) == sample["cuts"]
            if row.end is not None:
                assert story[-1]["event"] == str(row.state)
        assert repr(index.table.totals) == repr(self.state.totals)
        assert +index.table.counts == +self.state.counts
        assert index.table.drop_reasons == self.state.drop_reasons
        assert index.table.steps_done == self.state.steps_done
        assert index.table.covered_step == self.state.covered_step
        for step in {row.step for row in rows.values()} - {None}:
            assert step is not None
            assert uids(index.of_step(step)) == [u for u in newest(rows) if rows[u].step == step]
        for state in SampleState:
            of_state = [uid for uid in newest(rows) if rows[uid].state is state]
            chosen, num_samples = index.newest(2, state)
            assert (uids(chosen), num_samples) == (of_state[:2], len(of_state))
        long = [uid for uid in newest(rows) if rows[uid].num_tokens]
        chosen, num_samples = index.with_tokens(3)
        assert (uids(chosen), num_samples) == (long[:3], len(long))
        found = [row for row in rows.values() if row.reward is not None]
        for best in (False, True):
            chosen, num_samples = index.extremes(4, best=best)
            assert num_samples == len(found)
            ranked = sorted((row.reward or 0.0 for row in found), reverse=best)
            assert [row.reward for row in chosen] == ranked[:4]


def newest(rows: dict[int, SampleRow]) -> list[int]:
    return sorted(rows, reverse=True)


def uids(rows: Sequence[SampleRow | None]) -> list[int]:
    return [row.uid for row in rows if row is not None]


IndexedLedgers.TestCase.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
TestIndexedLedgers = pytest.mark.slow(IndexedLedgers.TestCase)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ledger in many parts, whose index was written; the job went back to step 2 of 4."""
    folder = tmp_path / "run" / "ledger" / "rollouts"
    steps: list[list[Event]] = [[Version(0, 0), Evaluated(0, 0.0, {"accuracy": 0.5})]]
    for step in range(4):
        steps.append([*life_of_a_group(2 * step, f"p{step}", step, step)])
        steps.append([Version(step + 1, step + 1), Evaluated(step + 1, 0.0, {"samples": []})])
        if step == 1:
            steps.append([Checkpoint(2, 2)])
    with LedgerLog.open(folder, "job-1", part_nbytes=1) as log:
        write_events(log, *steps, [admitted(8, "p4"), Dropped(uids_of(9), "old", "of step 0")])
    with LedgerLog.open(folder, "job-2", part_nbytes=300) as log:
        write_events(log, [Restored(2, 2)], [Version(9, 2)])
        write_events(
            log,
            [Leased(2, uids_of(4, 5)), Version(10, 3)],
            *[[Version(v, 3)] for v in range(11, 30)],
        )
    LedgerIndex(folder)
    return folder


def told(index: LedgerIndex) -> dict[str, Any]:
    """Everything that can be asked."""
    rows, num_samples = index.newest(None)
    return {
        "rows": [row.facts() | {"runs": row.runs(), "story": index.story(row)} for row in rows],
        "num_samples": num_samples,
        "contents": {uid: content.tokens.tolist() for uid, content in index.contents(rows).items()},
        "steps": (index.steps(), [uids(index.of_step(step)) for step in range(5)]),
        "of": (uids(index.with_tokens(3)[0]), uids(index.extremes(3, best=True)[0])),
        "counts": +index.table.counts,
        "totals": index.table.totals,
        "evaluations": index.evaluations(),
        "lives": index.lives(),
        "end": index.end,
    }


def test_what_the_index_has_is_not_read_from_the_log(folder: Path) -> None:
    everything = told(LedgerIndex(folder))
    for path in sorted(folder.glob("*.log"))[:-1]:
        payload = ledger_frames.read_first(path)
        assert payload is not None
        nbytes, header_nbytes = path.stat().st_size, ledger_frames.HEAD_NBYTES + len(payload)
        header = path.read_bytes()[:header_nbytes]
        path.write_bytes(header + bytes(nbytes - header_nbytes))  # nothing else is left of it

    index = LedgerIndex(folder)

    assert everything["steps"] == ([0, 2], [[1, 0], [3, 2], [5, 4], [], []])
    assert index.steps() == [0, 2]
    assert [uids(index.of_step(step)) for step in range(3)] == [[1, 0], [3, 2], [5, 4]]
    assert (+index.table.counts, index.evaluations()) == (
        everything["counts"],
        everything["evaluations"],
    )
    assert [row.facts()["drop_detail"] for row in index.newest(1, SampleState.DROPPED)[0]] == [
        "old: of step 0"
    ]
    assert uids(index.extremes(3, best=True)[0]) == [4, 2, 0]
    assert index.similar("e0/p2/7") == ["e0/p2/0", "e0/p2/1"]
    with pytest.raises(LedgerError, match=r"000001-000\d.log is damaged"):
        index.contents(index.of_step(0))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_another(path: Path) -> None:
    others = [other for other in path.parent.glob("*.index") if other != path]
    path.write_bytes(others[0].read_bytes())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_unwritable(path: Path) -> None:
    path.unlink()
    path.with_suffix(".draft").mkdir()


@pytest.mark.parametrize(
    "harm", [Path.unlink, cut, empty, replace_by_another, flip, make_unwritable]
)
@pytest.mark.parametrize("chosen", ["one", "all", "while it is read"])
def test_whatever_happens_to_an_index_the_answers_stay(
    folder: Path, harm: Callable[[Path], None], chosen: str
) -> None:
    index = LedgerIndex(folder)
    everything = told(index)
    paths = sorted(folder.glob("*.index"))
    assert len(paths) > 8
    if chosen == "while it is read":
        index = LedgerIndex(folder)
    for path in paths[4:5] if chosen == "one" else paths:
        harm(path)
    if chosen != "while it is read":
        index = LedgerIndex(folder)

    assert told(index) == everything
    assert told(LedgerIndex(folder)) == everything


def test_an_index_of_bytes_that_a_later_incarnation_does_not_count_is_not_used(
    folder: Path,
) -> None:
    old = LedgerLog.open(folder, "job-3", part_nbytes=1)
    write_events(old, [Version(40, 3)])
    with LedgerLog.open(folder, "job-4") as log:
        write_events(log, [Version(41, 3)])
    with pytest.raises(LedgerError, match="has begun"):
        write_events(old, [Version(666, 4)])
    old.close()
    (late,) = folder.glob("000003-0001.log")
    late.rename(folder / "kept")
    (folder / "000004-0000.log").rename(folder / "kept-4")
    late.write_bytes((folder / "kept").read_bytes())
    LedgerIndex(folder).write()  # as the old incarnation saw it
    (folder / "kept-4").rename(folder / "000004-0000.log")

    index = LedgerIndex(folder)

    assert max(index.table.versions) == 41
    assert index.table.steps_done == 3


def test_a_reader_goes_back_behind_bytes_that_a_later_incarnation_does_not_count(
    tmp_path: Path,
) -> None:
    old = LedgerLog.open(tmp_path, "job")
    write_events(old, [Version(0, 0)])
    with LedgerLog.open(tmp_path, "job") as log:
        write_events(log, [Version(1, 0)])
    with pytest.raises(LedgerError, match="has begun"):
        write_events(old, [Version(666, 1)])
    old.close()
    successor = tmp_path / "000002-0000.log"
    successor.rename(tmp_path / "kept")  # as while its header was not written yet
    index = LedgerIndex(tmp_path)
    assert max(index.table.versions) == 666
    (tmp_path / "kept").rename(successor)

    index.refresh()

    assert index.table.versions == {0: 0, 1: 0}
    assert told(index) == told(LedgerIndex(tmp_path))


@contextmanager
def full_disk() -> Generator[None]:
    """A write fails in the middle of any file that is longer than a frame's head."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_index_that_does_not_fit_on_the_disk_leaves_no_file(folder: Path) -> None:
    everything = told(LedgerIndex(folder))
    for path in folder.glob("*.index"):
        path.unlink()
    with full_disk():
        assert told(LedgerIndex(folder)) == everything

    assert {path.suffix for path in folder.iterdir()} == {".log"}


def test_an_index_of_a_ledger_that_was_replaced_is_not_used(tmp_path: Path) -> None:
    """As a reader or a snapshot process of the old run writes it, while a new run begins."""
    for name, first, last, time_s in (("old", 7, 8, 1.0), ("new", 0, 9, 2.0)):
        with LedgerLog.open(tmp_path / name, "job", clock=lambda at=time_s: at) as log:
            write_events(log, *[[Version(v, 0)] for v in range(first, last)])
    LedgerIndex(tmp_path / "old").write()
    (late,) = (tmp_path / "old").glob("*.index")
    everything = told(LedgerIndex(tmp_path / "new"))
    late.rename(tmp_path / "new" / late.name)

    index = LedgerIndex(tmp_path / "new")

    assert index.table.versions == dict.fromkeys(range(9), 0)
    assert told(index) == everything


def test_the_next_reader_begins_where_the_last_one_wrote(folder: Path) -> None:
    with LedgerLog.open(folder, "job-3") as log:
        (*_, end) = write_events(log, *[[Version(v, 3)] for v in range(40, 90)])
        LedgerIndex(folder).write()
        (*earlier, last) = read_history(folder).parts
        part = IndexPart.read(last, sum(part.stop for part in earlier))
        write_events(log, life_of_a_group(10, "p5", 3, 89), [Version(90, 4)])

        index = LedgerIndex(folder)

    assert part.facts.nbytes == end.offset
    for path in folder.glob("*.index"):
        path.unlink()
    assert told(LedgerIndex(folder)) == told(index)
    assert index.table.steps_done == 4


def test_what_leaves_the_window_is_reduced_and_still_accounted_for(folder: Path) -> None:
    index = LedgerIndex(folder)
    everything = told(index)
    contents = index.contents(index.newest(None)[0])
    logs = sorted(folder.glob("*.log"))

    seldom = LedgerIndex(folder)  # reads on when the logs are gone
    index.remove_oldest(0, Position(1, 4, 0))

    gone = [path for path in logs if not path.exists()]
    assert gone == logs[:4]
    for reader in (index, LedgerIndex(folder), seldom):
        found = told(reader)
        for name in ("num_samples", "steps", "of", "counts", "totals", "evaluations", "lives"):
            assert found[name] == everything[name]
        first = reader.of_step(0)
        assert reader.story(first[0]) == []
        assert [reader.digest(row) for row in first] == [
            digest_of(contents[row.uid].tokens).hex() for row in first
        ]
        kept = reader.contents(first)  # both are kept: the best and the worst
        assert {uid: c.tokens.tolist() for uid, c in kept.items()} == {0: [1, 2, 3], 1: [4, 5]}
    with pytest.raises(
        LedgerError, match=r"000001-0000.log was removed, because rollout.ledger_gb"
    ):
        list(read_history(folder).entries())


def test_a_reader_that_slept_goes_on_when_the_part_that_it_was_in_has_left(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job", part_nbytes=2000) as log:
        write_events(log, [Version(0, 0)], life_of_a_group(0, "a", 0, 0))
        index = LedgerIndex(tmp_path)
        for step in range(1, 30):
            write_events(log, life_of_a_group(2 * step, str(step), step, 0), [Version(step, step)])
        LedgerIndex(tmp_path).remove_oldest(0, Position(9, 0, 0))
        assert not (tmp_path / "000001-0000.log").exists()

        index.refresh()

    assert told(index)["counts"] == told(LedgerIndex(tmp_path))["counts"]
    assert uids(index.of_step(0)) == [1, 0]


def test_no_log_is_removed_whose_index_is_not_on_the_disk(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job", part_nbytes=2000) as log:
        write_events(log, [Version(0, 0)], life_of_a_group(0, "a", 0, 0))
        LedgerIndex(tmp_path).write()  # of the part's beginning
        for step in range(1, 30):
            write_events(log, life_of_a_group(2 * step, str(step), step, 0), [Version(step, step)])
    with full_disk():
        index = LedgerIndex(tmp_path)

    index.remove_oldest(0, Position(9, 0, 0))

    assert (tmp_path / "000001-0000.log").exists()
    everything = told(index)
    LedgerIndex(tmp_path).remove_oldest(0, Position(9, 0, 0))
    assert not (tmp_path / "000001-0000.log").exists()
    assert told(LedgerIndex(tmp_path))["of"] == everything["of"]


@pytest.mark.parametrize("harm", [cut, empty, flip])
def test_an_index_that_is_damaged_is_written_again_before_its_log_leaves(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    everything = told(LedgerIndex(folder))["of"]
    index = LedgerIndex(folder)
    harm(folder / "000001-0001.index")

    index.remove_oldest(0, Position(1, 4, 0))

    assert not (folder / "000001-0001.log").exists()
    assert told(LedgerIndex(folder))["of"] == everything


@pytest.mark.parametrize("harm", [Path.unlink, cut, empty, flip])
def test_an_index_that_is_damaged_when_its_log_has_left_is_named(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    LedgerIndex(folder).remove_oldest(0, Position(1, 4, 0))
    for number in range(4):
        harm(folder / f"000001-000{number}.index")

    with pytest.raises(LedgerError, match=r"000001-000\d.index is missing or damaged, and 000001-"):
        told(LedgerIndex(folder))


def test_of_a_step_that_left_the_window_the_best_and_the_worst_stay(tmp_path: Path) -> None:
    uids_of_group = uids_of(*range(6))
    with LedgerLog.open(tmp_path, "job", part_nbytes=1) as log:
        write_events(
            log,
            [Version(0, 0), admitted(0, "a", 6), Started(uids_of_group)],
            [runs_of(*[(uid, 0, 0, [uid, uid]) for uid in range(6)])],
            [Finished(uids_of_group, ["stop"] * 6)],
            [Scored(uids_of_group, np.asarray([0.5, 0.1, 0.9, 0.2, 0.3, 0.4]))],
            [Leased(0, uids_of_group), Version(1, 1)],
            [Version(2, 1)],
        )
    index = LedgerIndex(tmp_path)
    assert len(index.contents(index.of_step(0))) == 6

    index.remove_oldest(0, Position(9, 0, 0))
    index = LedgerIndex(tmp_path)

    rows = index.of_step(0)
    assert {uid: content.tokens.tolist() for uid, content in index.contents(rows).items()} == {
        1: [1, 1],
        2: [2, 2],
    }
    assert [index.digest(row) for row in rows] == [
        digest_of(np.asarray([u, u], np.int32)).hex() for u in uids(rows)
    ]


def test_a_few_logs_leave_at_a_time(tmp_path: Path) -> None:
    with LedgerLog.open(tmp_path, "job", part_nbytes=1) as log:
        write_events(log, [Version(0, 0)], life_of_a_group(0, "a", 0, 0), [Version(1, 1)])
        write_events(log, *[[Version(v, 1)] for v in (2, 3)])
    logs = sorted(tmp_path.glob("*.log"))

    for num_removed in (2, 4):
        LedgerIndex(tmp_path).remove_oldest(0, Position(9, 0, 0), max_parts=2)

        assert sorted(tmp_path.glob("*.log")) == logs[num_removed:]


def test_samples_that_are_trained_again_after_they_had_left_the_log_leave_it_once_more(
    tmp_path: Path,
) -> None:
    """As if a snapshot had their tokens when the job went back to a checkpoint."""
    with LedgerLog.open(tmp_path, "job", part_nbytes=1) as log:
        group = life_of_a_group(0, "a", 0, 0)
        write_events(log, [Version(0, 0)], group, *[[Version(v, 1)] for v in (1, 2)])
    LedgerIndex(tmp_path).remove_oldest(0, Position(9, 0, 0))
    with LedgerLog.open(tmp_path, "job", part_nbytes=1) as log:
        write_events(log, [Restored(0, 0), Leased(0, uids_of(0, 1))])
        write_events(log, *[[Version(v, 1)] for v in (3, 4, 5)])
    logs = sorted(tmp_path.glob("*.log"))

    LedgerIndex(tmp_path).remove_oldest(0, Position(9, 0, 0))

    assert sorted(tmp_path.glob("*.log")) == logs[-1:]
    index = LedgerIndex(tmp_path)
    assert [str(row.state) for row in index.of_step(0)] == ["trained", "trained"]
    assert [index.digest(row) for row in index.of_step(0)] == [None, None]
    assert index.contents(index.of_step(0)) == {}


@pytest.mark.parametrize("needed", ["window", "snapshot", "sample"])
def test_nothing_is_removed_that_something_needs(tmp_path: Path, needed: str) -> None:
    with LedgerLog.open(tmp_path, "job", part_nbytes=1) as log:
        events = life_of_a_group(0, "a", 0, 0)
        later = [Version(1, 1)] if needed != "sample" else []
        write_events(log, [Version(0, 0)], *[[event] for event in events], later, [])
    logs = sorted(tmp_path.glob("*.log"))
    keep_nbytes = sum(path.stat().st_size for path in logs[2:]) if needed == "window" else 0
    index = LedgerIndex(tmp_path)
    contents = index.contents(index.newest(None)[0])

    index.remove_oldest(keep_nbytes, Position(1, 3 if needed == "snapshot" else 99, 0))

    num_removed = {"window": 2, "snapshot": 3, "sample": 2}[needed]
    assert [path.exists() for path in logs] == [False] * num_removed + [True] * (
        len(logs) - num_removed
    )
    if needed == "snapshot":  # the samples' first tokens have left the log, their end has not
        for row in index.of_step(0):
            assert index.digest(row) == digest_of(contents[row.uid].tokens).hex()
