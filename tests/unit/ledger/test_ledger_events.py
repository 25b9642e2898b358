"""Events come back as they were written, and bad ones are refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_samples import runs_of, wire

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Checkpoint,
    Cut,
    Dropped,
    Evaluated,
    Event,
    Finished,
    Leased,
    PromptGiven,
    Recorded,
    Reset,
    Restored,
    RewardParts,
    Scored,
    Started,
    TeacherLogprobs,
    Tokens,
    Version,
    decode_batches,
    encode_batches,
    uids_of,
)

NUMBERS = st.integers(0, 2**63 - 1)
UIDS = st.lists(NUMBERS, max_size=5).map(lambda found: uids_of(*found))
TEXTS = st.text(max_size=8)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(
    lambda found: np.asarray(found, np.int32)
)
REWARDS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | TEXTS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
RUNS = st.lists(
    st.tuples(
        NUMBERS,
        st.integers(0, 2**40),
        st.integers(-1, 2**40),
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    ),
    max_size=4,
).map(lambda runs: runs_of(*runs))


@st.composite
def finishes(draw: st.DrawFn) -> Finished:
    uids = draw(UIDS)
    return Finished(uids, [draw(TEXTS) for _ in uids])


@st.composite
def scores(draw: st.DrawFn) -> Scored:
    uids = draw(UIDS)
    return Scored(uids, np.asarray([draw(REWARDS) for _ in uids], np.float64))


@st.composite
def reward_parts(draw: st.DrawFn) -> RewardParts:
    uids, names = draw(UIDS), draw(st.lists(TEXTS, max_size=3))
    values = [draw(REWARDS | st.just(math.nan)) for _ in uids for _ in names]
    return RewardParts(uids, names, np.asarray(values, np.float64))


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Version, NUMBERS, NUMBERS),
    st.builds(
        Admitted, NUMBERS, TEXTS, TEXTS, NUMBERS, NUMBERS, UIDS.filter(lambda seeds: len(seeds) > 0)
    ),
    st.builds(Started, UIDS),
    st.builds(Cut, UIDS, TEXTS),
    RUNS,
    st.builds(
        TeacherLogprobs,
        NUMBERS,
        st.lists(st.floats(-99, 0, width=32), max_size=5).map(
            lambda found: np.asarray(found, np.float32)
        ),
    ),
    st.builds(PromptGiven, NUMBERS, TOKENS),
    st.builds(Reset, NUMBERS, TEXTS),
    st.builds(Recorded, NUMBERS, TEXTS, VALUES),
    finishes(),
    scores(),
    reward_parts(),
    st.builds(Leased, NUMBERS, UIDS),
    st.builds(Dropped, UIDS, TEXTS, TEXTS),
    st.builds(Checkpoint, NUMBERS, NUMBERS),
    st.builds(Restored, NUMBERS, NUMBERS),
    st.builds(Evaluated, NUMBERS, REWARDS, st.dictionaries(TEXTS, VALUES, max_size=3)),
)


def _payload(batches: Iterable[tuple[float, Sequence[Event]]]) -> bytes:
    return b"".join(
        data for time_s, events in batches for data in encode_batches(float(time_s), events)
    )


@given(st.lists(st.lists(EVENTS, max_size=4), max_size=4))
def test_events_come_back_as_written(batches: Sequence[Sequence[Event]]) -> None:
    payload = _payload(enumerate(batches))

    found = list(decode_batches(payload))

    assert [batch.time_s for batch in found] == [float(idx) for idx in range(len(batches))]
    assert [list(map(type, batch.events)) for batch in found] == [
        list(map(type, batch)) for batch in batches
    ]
    again = _payload((batch.time_s, batch.events) for batch in found)
    assert again == payload


@given(st.lists(EVENTS, min_size=1, max_size=3), st.data())
def test_a_shortened_payload_is_refused(events: list[Event], data: st.DataObject) -> None:
    payload = _payload([(1.0, events)])
    length = data.draw(st.integers(1, len(payload) - 1))

    with pytest.raises(LedgerError, match="cannot be decoded"):
        list(decode_batches(payload[:length]))


def test_columns_keep_their_values_and_types() -> None:
    (batch,) = decode_batches(wire(runs_of((7, 3, -1, [5, 6]), (8, 0, 2, [9]))))

    (event,) = batch.events
    assert isinstance(event, Tokens)
    assert event.uids.tolist() == [7, 8]
    assert event.starts.tolist() == [3, 0]
    assert event.offsets.tolist() == [0, 2, 3]
    assert event.versions.tolist() == [-1, 2]
    assert (event.tokens.dtype, event.tokens.tolist()) == (np.int32, [5, 6, 9])
    assert (event.logprobs.dtype, event.logprobs.tolist()) == (np.float32, [-5, -6, -9])


def test_a_value_that_is_no_plain_data_is_refused_by_its_key() -> None:
    with pytest.raises(LedgerError, match=r"the value of my_tool.*plain data"):
        wire(Recorded(0, "my_tool", object()))


def test_numbers_of_numpy_are_numbers() -> None:
    assert wire(Version(np.int64(3), 4)) == wire(Version(3, 4))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("number", [-1, 1.5, "x", True])
def test_what_is_no_count_is_refused(number: Any) -> None:
    with pytest.raises(LedgerError, match="cannot be encoded"):
        wire(Version(number, 0))


def test_events_that_are_too_much_for_one_batch_become_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("umbra.runtime.rollout.ledger.ledger_events.BATCH_MAX_NBYTES", 1000)
    sizes = [900, 50, 400, 900, 10, 10]
    events = [Recorded(0, str(at), b"x" * size) for at, size in enumerate(sizes)]

    batches = encode_batches(1.0, events)

    assert len(batches) == 3
    assert max(map(len, batches)) <= 1000
    decoded = list(decode_batches(b"".join(batches)))
    assert [batch.time_s for batch in decoded] == [1.0] * 3
    assert [wire(event) for batch in decoded for event in batch.events] == [*map(wire, events)]


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (Recorded(0, "page", b"x" * 1000), r"the value of page has \d+ bytes.*at most 1000.*file"),
        (
            PromptGiven(0, np.zeros(250, np.int32)),
            r"a prompt of 250 tokens has \d+ bytes.*at most 1000.*pool\.max_context_len",
        ),
        (Dropped(uids_of(0), "x", "y" * 1000), r"Dropped has \d+ bytes.*at most 1000"),
    ],
)
def test_an_event_that_is_too_large_is_refused_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, event: Event, problem: str
) -> None:
    monkeypatch.setattr("umbra.runtime.rollout.ledger.ledger_events.BATCH_MAX_NBYTES", 1000)

    with pytest.raises(LedgerError, match=problem):
        wire(event)


@given(RUNS)
def test_parts_of_runs_are_the_same_runs_in_order(runs: Tokens) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("umbra.runtime.rollout.ledger.ledger_events._EVENT_MAX_TOKENS", 3)
        parts = list(runs.parts())

    assert all(len(part.tokens) <= 3 for part in parts)
    assert [token for part in parts for token in _tokens_of(part)] == _tokens_of(runs)


def _tokens_of(runs: Tokens) -> list[tuple[int, int, int, int, float]]:
    """(uid, position, version, token, logprob) of each token."""
    which = np.repeat(np.arange(len(runs.uids)), np.diff(runs.offsets))
    positions = runs.starts[which] + np.arange(len(runs.tokens)) - runs.offsets[which]
    columns = (runs.uids[which], positions, runs.versions[which], runs.tokens, runs.logprobs)
    return list(zip(*[column.tolist() for column in columns], strict=True))


def test_inconsistent_columns_are_refused() -> None:
    good = runs_of((0, 0, 0, [1, 2]))
    uids, starts, offsets, versions = good.uids, good.starts, good.offsets, good.versions
    tokens, logprobs = good.tokens, good.logprobs

    with pytest.raises(ValueError, match="differ in length"):
        Tokens(uids, uids_of(0, 1), offsets, versions, tokens, logprobs)
    with pytest.raises(ValueError, match="differ in length"):
        Tokens(uids, starts, offsets, versions, tokens, logprobs[:1])
    with pytest.raises(ValueError, match="do not cut"):
        Tokens(uids, starts, uids_of(0, 1), versions, tokens, logprobs)
    with pytest.raises(ValueError, match="negative"):
        Tokens(uids, starts, offsets, uids_of(-2), tokens, logprobs)
    with pytest.raises(ValueError, match="finite"):
        Tokens(uids, starts, offsets, versions, tokens, logprobs * np.float32(np.nan))
    with pytest.raises(ValueError, match="finite"):
        Scored(uids, np.asarray([np.inf]))
    with pytest.raises(ValueError, match="expected one value per uid and name"):
        RewardParts(uids, ["a", "b"], np.zeros(1))
    with pytest.raises(ValueError, match="some teacher logprobs are not finite"):
        TeacherLogprobs(0, np.asarray([np.nan], np.float32))
    with pytest.raises(ValueError, match="expected one reason per uid"):
        Finished(uids, [])


@pytest.mark.parametrize(
    "item",
    [
        [1.0, [99, 1]],  # an unknown kind of event
        [1.0, [1, 1]],  # a field is missing
        [1.0, [1, 1, "x"]],  # a field of another type
        [1.0, [3, b"1234567"]],  # a column that is no whole number of values
        [1.0, [10, b"\0" * 8, b"\0" * 16]],  # columns of different length
        [1.0, 5],
        ["now", [1, 1, 1]],
        5,
        [],
    ],
)
def test_what_is_no_batch_is_refused(item: Any) -> None:
    with pytest.raises(LedgerError, match="cannot be decoded"):
        list(decode_batches(msgpack.packb(item)))


def test_a_third_field_of_earlier_umbras_is_passed_over() -> None:
    (batch,) = decode_batches(msgpack.packb([1.0, [14, 2, 3, False]]))

    assert [wire(event) for event in batch.events] == [wire(Restored(2, 3))]
