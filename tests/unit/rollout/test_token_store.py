"""The store of tokens in flight, compared with lists; and batches with every kind of run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.rollout.dispatch.token_store import (
    EMPTY,
    NO_ROW,
    PAGE_LEN,
    RequestRows,
    Segment,
    TokenPages,
    TokenStore,
)

Run = tuple[int, int, Sequence[int], int]  # request, position, tokens, version


def batch_of(runs: Sequence[Run]) -> DeltaBatch:
    tokens = np.asarray([token for run in runs for token in run[2]], np.int32)
    return DeltaBatch(
        ids=np.asarray([run[0] for run in runs], np.int64),
        positions=np.asarray([run[1] for run in runs], np.int64),
        bounds=np.cumsum([0, *(len(run[2]) for run in runs)]),
        versions=np.asarray([run[3] for run in runs], np.int64),
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        finishes=[],
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_pages_hold_what_was_appended_whoever_else_comes_and_goes(seed: int) -> None:
    chance = random.Random(seed)
    pages = TokenPages()
    model: dict[int, list[int]] = {}  # by name of the sequence
    cursors: dict[int, int] = {}

    for step in range(40):
        if chance.random() < 0.3 and cursors:
            name = chance.choice(list(cursors))
            pages.release(cursors.pop(name))
            del model[name]
        for name in range(step * 5, step * 5 + chance.randrange(5)):
            model[name], cursors[name] = [], EMPTY
        names = chance.sample(list(cursors), chance.randrange(len(cursors) + 1))
        if not names:
            continue
        counts = [chance.choice([0, 1, 3, PAGE_LEN, 3 * PAGE_LEN + 1]) for _ in names]
        tokens = np.arange(sum(counts), dtype=np.int32) + step
        bounds = np.cumsum([0, *counts])
        grown = pages.append(
            np.asarray([cursors[name] for name in names]),
            bounds[:-1],
            np.diff(bounds),
            tokens,
            -tokens.astype(np.float32),
        )
        for name, cursor, start, stop in zip(names, grown, bounds[:-1], bounds[1:], strict=True):
            cursors[name] = int(cursor)
            model[name] += tokens[start:stop].tolist()
        pages.check_integrity(list(cursors.values()))

    for name, cursor in cursors.items():
        found, logprobs = pages.read(cursor)
        assert found.tolist() == model[name]
        assert (-logprobs).tolist() == model[name]
        assert not model[name] or pages.last_token(cursor) == model[name][-1]


def test_pages_that_were_given_back_are_used_again() -> None:
    pages = TokenPages()
    tokens = np.zeros(10 * PAGE_LEN, np.int32)
    for _ in range(100):
        cursors = pages.append(
            np.asarray([EMPTY]), np.zeros(1, np.int64), np.asarray([len(tokens)]), tokens,
            tokens.astype(np.float32),
        )  # fmt: skip
        pages.check_integrity(cursors.tolist())
        assert cursors[0] <= 11 * PAGE_LEN  # in the ten pages after the first
        pages.release(int(cursors[0]))

    pages.check_integrity([])


def test_request_ids_are_found_while_they_are_there_and_never_again() -> None:
    rows = RequestRows()
    live = [1]
    rows.put(1, 7)  # stays for long
    for request_id in range(2, 20_000):
        rows.put(request_id, request_id % 50 + 1)
        live.append(request_id)
        if len(live) > 20:
            rows.drop(live.pop(0 if request_id > 10_000 else 1))

    asked = np.asarray([*live, 0, 1, 5, 19_000, 20_000, 2**62, -(2**63)])
    found = rows.find(asked).tolist()

    assert found == [request % 50 + 1 for request in live] + [NO_ROW] * 7


def test_only_runs_that_simply_extend_their_rows_are_applied_at_once() -> None:
    store = TokenStore()
    for request_id in range(1, 9):
        store.open(request_id, 0, 100 + request_id, length=10, capacity=4)
    store.open(9, 1, 109, length=10, capacity=4)
    store.apply(0, batch_of([(1, 10, [5], 3), (2, 10, [5], 3)]))

    applied = store.apply(
        0,
        batch_of(
            [
                (1, 11, [6, 7], 3),  # extends its row
                (2, 11, [6], 4),  # another version
                (3, 10, [], 3),  # nothing
                (4, 10, [1, 2, 3, 4, 5], 3),  # too much
                (5, 12, [1], 3),  # a gap
                (6, 9, [1, 2], 3),  # a repeat
                (7, 10, [1], 3),  # several runs of one
                (7, 11, [2], 4),
                (8, 10, [8, 8, 8, 8], 4),  # extends its row
                (9, 10, [1], 3),  # of another engine
                (77, 0, [1], 3),  # unknown request
            ]
        ),
    )

    assert applied.irregular == [1, 2, 3, 4, 5, 6, 7]
    assert applied.num_late == 2
    assert applied.num_late_tokens == 2
    assert applied.runs is not None
    assert applied.runs.uids.tolist() == [101, 108]
    assert applied.runs.starts.tolist() == [11, 10]
    assert applied.runs.offsets.tolist() == [0, 2, 6]
    assert applied.runs.versions.tolist() == [3, 4]
    assert applied.runs.tokens.tolist() == [6, 7, 8, 8, 8, 8]
    store.check_integrity()


def test_an_attempt_of_several_versions_keeps_its_segments() -> None:
    store = TokenStore()
    row = store.open(1, 0, -1, length=2, capacity=100)
    one = np.ones(1, np.int32), np.ones(1, np.float32)

    store.append(row, *one, 5)
    store.apply(0, batch_of([(1, 3, [1, 1], 5)]))
    store.append(row, *one, 6)
    store.apply(0, batch_of([(1, 6, [1], 6)]))

    assert store.segments(row) == [Segment(2, 5, 5), Segment(5, 7, 6)]
    assert store.length(row) == 7
    store.close(1, row)
    again = store.open(2, 0, -1, length=0, capacity=1)
    assert again == row
    assert store.segments(again) == []


def test_rows_grow_with_the_attempts() -> None:
    store = TokenStore()
    count = 1000

    rows = [store.open(i, 0, i, length=0, capacity=9) for i in range(1, count + 1)]
    store.apply(0, batch_of([(i, 0, [i, i], 0) for i in range(1, count + 1)]))

    assert len(set(rows)) == count
    assert all(store.read(row)[0].tolist() == [i, i] for i, row in enumerate(rows, 1))
    store.check_integrity()
