"""Which requests run, and the rows that they have."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_runs import Collector, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.engines.embedded.embedded_core import RowTable
from umbra.engines.embedded.scheduler import (
    MIN_CAPACITY,
    Limits,
    plan_admission,
    plan_growth,
)
from umbra.runtime.engine_api.token_deltas import DeltaBuffer
from umbra.runtime.errors import ConfigError


def limits(num_tokens: int, *, num_seqs: int = 64, context: int = 1024) -> Limits:
    return Limits(max_num_seqs=num_seqs, max_context_len=context, kv_cache_num_tokens=num_tokens)


def admit(
    bounds: Limits, waiting: list[int], *, running: int = 0, longest: int = 0, capacity: int = 64
) -> tuple[int, int]:
    admission = plan_admission(
        bounds,
        waiting_lens=waiting,
        num_running=running,
        longest_running=longest,
        capacity=capacity,
    )
    return admission.count, admission.capacity


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_context_len": 0}, "max_context_len"),
        ({"kv_cache_num_tokens": 127}, "kv_cache_num_tokens=127 cannot hold one sequence"),
    ],
)
def test_limits_that_cannot_work_are_refused(change: dict[str, int], text: str) -> None:
    settings = {"max_num_seqs": 4, "max_context_len": 128, "kv_cache_num_tokens": 512} | change

    with pytest.raises(ConfigError, match=text):
        Limits(**settings)


def test_capacity_climbs_in_doublings_up_to_the_context() -> None:
    bounds = limits(4096, context=200)

    capacities = [bounds.capacity_for(n) for n in (1, 64, 65, 128, 129, 200)]

    assert capacities == [64, 64, 128, 128, 200, 200]


def test_short_requests_fill_the_cache_that_fewer_long_ones_fill() -> None:
    bounds = limits(1024)

    assert admit(bounds, [10] * 100) == (16, 64)
    assert admit(bounds, [100] * 100) == (8, 128)
    assert admit(bounds, [1000] * 100) == (1, 1024)


def test_whoever_does_not_fit_blocks_those_behind() -> None:
    bounds = limits(1024)

    assert admit(bounds, [1000, 10, 10], running=1, longest=10) == (0, 64)


def test_a_prefill_batch_is_bounded_with_its_padding_but_never_empty() -> None:
    bounds = Limits(
        max_num_seqs=64, max_context_len=512, kv_cache_num_tokens=1 << 20, prefill_num_tokens=300
    )

    assert admit(bounds, [50] * 100, capacity=512)[0] == 6
    assert admit(bounds, [50, 50, 200], capacity=512)[0] == 2
    assert admit(bounds, [400, 1], capacity=512)[0] == 1


def test_rows_shrink_only_to_admit_a_request() -> None:
    bounds = limits(1024)

    assert admit(bounds, [10], running=2, longest=20, capacity=256) == (1, 256)
    assert admit(bounds, [10] * 9, running=0, capacity=256) == (9, 64)


def test_growth_is_free_while_rows_fit() -> None:
    growth = plan_growth(limits(1024), lens=[65, 30, 20], arrivals=[0, 1, 2], capacity=64)

    assert (growth.capacity, growth.evicted) == (128, ())


def test_growth_evicts_the_few_that_outgrow_the_many() -> None:
    lens = [30] * 15 + [65]

    growth = plan_growth(limits(1024), lens=lens, arrivals=list(range(16)), capacity=64)

    assert (growth.capacity, growth.evicted) == (64, (15,))


@pytest.mark.parametrize("num_outgrown", [8, 16])
def test_growth_evicts_the_youngest_where_many_outgrow(num_outgrown: int) -> None:
    lens = [30] * (16 - num_outgrown) + [65] * num_outgrown
    arrivals = list(reversed(range(16)))

    growth = plan_growth(limits(1024), lens=lens, arrivals=arrivals, capacity=64)

    assert growth.capacity == 128
    assert sorted(growth.evicted) == list(range(8))


@given(
    lens=st.lists(st.integers(1, 512), min_size=1, max_size=40),
    num_tokens=st.integers(512, 8192),
)
def test_growth_always_leaves_somebody_running_within_the_cache(
    lens: list[int], num_tokens: int
) -> None:
    bounds = limits(num_tokens, context=512)
    capacity = MIN_CAPACITY
    lens = lens[: bounds.num_rows(capacity)]

    growth = plan_growth(bounds, lens=lens, arrivals=list(range(len(lens))), capacity=capacity)

    kept = [n for row, n in enumerate(lens) if row not in growth.evicted]
    assert max(kept, default=0) <= growth.capacity
    assert len(kept) <= bounds.num_rows(growth.capacity)
    # Those who gave way can come back once the others are done, so something always runs next.
    assert kept or bounds.num_rows(bounds.capacity_for(max(lens))) >= 1


@given(
    waiting=st.lists(st.integers(1, 512), min_size=1, max_size=40),
    num_tokens=st.integers(512, 8192),
    num_seqs=st.integers(1, 64),
)
def test_an_idle_engine_always_admits(waiting: list[int], num_tokens: int, num_seqs: int) -> None:
    bounds = limits(num_tokens, num_seqs=num_seqs, context=512)

    count, capacity = admit(bounds, waiting, capacity=0)

    assert 1 <= count <= bounds.num_rows(capacity)
    assert max(waiting[:count]) <= capacity


MAX_ROWS = 5


@dataclass
class Naive:
    prompt: list[int]
    position: int
    stops: tuple[int, ...]
    made: list[int] = field(default_factory=list[int])


class RowTableMachine(RuleBasedStateMachine):
    """`alive` holds what runs, `past` what was removed; deltas must tell the same story."""

    @initialize()
    def start(self) -> None:
        self.table = RowTable(max_rows=MAX_ROWS, max_context_len=200)
        self.buffer = DeltaBuffer()
        self.collector = Collector()
        self.alive: dict[int, Naive] = {}
        self.past: dict[int, Naive] = {}
        self.num_added = 0

    @precondition(lambda self: self.table.count < MAX_ROWS)
    @rule(
        prompt=st.lists(st.integers(0, 50), min_size=1, max_size=8),
        position=st.integers(0, 100),
        stops=st.lists(st.integers(0, 50), max_size=3),
    )
    def add(self, prompt: list[int], position: int, stops: list[int]) -> None:
        request = make_request(
            self.num_added, prompt, position=position, stop_token_ids=stops, max_new_tokens=4
        )
        self.table.append(request, self.num_added)
        self.alive[self.num_added] = Naive(prompt, position, tuple(stops))
        self.num_added += 1

    @precondition(lambda self: self.table.count > 0)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        count = self.table.count
        tokens = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
        ids = self.table.ids[:count].tolist()

        self.table.push(0, np.array(tokens), np.zeros(count, np.float32))
        stopped, ended = self.table.finished(0, np.array(tokens))

        for row, (request_id, token) in enumerate(zip(ids, tokens, strict=True)):
            naive = self.alive[request_id]
            naive.made.append(token)
            assert stopped[row] == (token in naive.stops)
            assert ended[row] == (len(naive.made) >= 4)

    @rule()
    def flush(self) -> None:
        self.table.cut_runs(self.table.all_rows(), self.buffer, version=3)
        batch = self.buffer.take()
        if batch is not None:
            self.collector.apply(batch)

    @precondition(lambda self: self.table.count > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.sets(st.integers(0, self.table.count - 1), min_size=1))
        ids = self.table.ids[list(rows)].tolist()
        self.table.cut_runs(np.array(sorted(rows)), self.buffer, version=3)

        self.table.remove(sorted(rows))

        for request_id in ids:
            self.past[request_id] = self.alive.pop(request_id)

    @invariant()
    def rows_hold_what_the_list_holds(self) -> None:
        count = self.table.count
        assert sorted(self.table.ids[:count].tolist()) == sorted(self.alive)
        assert len(self.table.requests) == count
        for row in range(count):
            naive = self.alive[int(self.table.ids[row])]
            rest = self.table.rest_of(row)
            assert rest.tokens.tolist() == naive.prompt + naive.made
            assert rest.position == naive.position + len(naive.made)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.flush()
        for request_id, naive in (self.alive | self.past).items():
            completion = self.collector[request_id]
            assert completion.tokens == naive.made
            if naive.made:
                assert completion.next_position == naive.position + len(naive.made)


RowTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRowTable = RowTableMachine.TestCase
