"""Falsified batches are what a bad way would deliver, and well formed all the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbra.engines.faulty.faulty_engine import first_halves, without_run
from umbra.runtime.engine_api.token_deltas import DeltaBatch, DeltaBuffer, DeltaColumns

Run = tuple[int, int, list[int]]  # id, position, tokens


def make_batch(lengths: list[int]) -> DeltaColumns:
    """Run r belongs to request 10 + r, starts at r, and ends it; token and logprob encode r."""
    buffer = DeltaBuffer()
    for run, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32) + 100 * run
        buffer.add_runs(
            ids=np.array([10 + run]),
            positions=np.array([run]),
            counts=np.array([length]),
            tokens=tokens,
            logprobs=-tokens.astype(np.float32),
            version=run,
        )
        buffer.add_finish(10 + run, "length")
    batch = buffer.take()
    assert batch is not None
    return batch


def runs_of(batch: DeltaColumns) -> list[Run]:
    """Its runs, checked as the manager checks them."""
    checked = DeltaBatch.from_wire(batch)
    assert checked.logprobs.tolist() == (-checked.tokens).tolist()
    assert checked.versions.tolist() == (checked.ids - 10).tolist()
    return [
        (
            int(checked.ids[run]),
            int(checked.positions[run]),
            checked.tokens[checked.bounds[run] : checked.bounds[run + 1]].tolist(),
        )
        for run in range(len(checked.ids))
    ]


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(lengths=LENGTHS, data=st.data())
def test_a_lost_run_leaves_the_others_and_all_finishes(
    lengths: list[int], data: st.DataObject
) -> None:
    batch = make_batch(lengths)
    whole = runs_of(batch)
    lost = data.draw(st.integers(0, len(lengths) - 1))

    spoiled = without_run(batch, lost)

    assert runs_of(spoiled) == whole[:lost] + whole[lost + 1 :]
    assert spoiled["finished_ids"].tolist() == batch["finished_ids"].tolist()
    assert spoiled["finish_reasons"] == batch["finish_reasons"]
    assert runs_of(batch) == whole, "the batch itself stays as it is"


@given(lengths=LENGTHS)
def test_first_halves_begin_where_the_runs_do_and_finish_nothing(lengths: list[int]) -> None:
    batch = make_batch(lengths)
    whole = runs_of(batch)

    halves = first_halves(batch)

    assert runs_of(halves) == [
        (request, position, tokens[: (len(tokens) + 1) // 2]) for request, position, tokens in whole
    ]
    assert len(halves["finished_ids"]) == len(halves["finish_reasons"]) == 0
    assert runs_of(batch) == whole, "the batch itself stays as it is"
