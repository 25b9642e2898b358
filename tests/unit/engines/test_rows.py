"""The row table against a list of objects, under random adding, sampling and removing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from engine_runs import Collector, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.engines.embedded.embedded_core import RowTable
from umbra.runtime.engine_api.token_deltas import DeltaBuffer

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
