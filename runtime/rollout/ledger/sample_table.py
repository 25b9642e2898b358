"""One row of facts for each sample, without its tokens, from a ledger's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from umbra.runtime.rollout.ledger.ledger_events import Evaluated, Event, Restored
from umbra.runtime.rollout.ledger.sample_accounts import (
    SampleRow,
    SampleState,
    Totals,
    rows_from_wire,
    rows_to_wire,
)
from umbra.runtime.rollout.ledger.sample_states import SampleStates


class EvaluationRow(NamedTuple):
    step: int
    temperature: float
    time_s: float
    outcome: dict[str, Any]


class SampleTable(SampleStates[SampleRow]):
    """The rows of samples that may change, and of those that ended in the part that is read. It
    follows events of a ledger that `LedgerState` accepts.

    Attributes:
        ended: since `begin_part`.
        counts: the samples of all parts by state.
        evaluations, restores: the evaluations, and the steps of the `Restored`, of this part.
        num_with_tokens, num_scored: of the samples that ended in earlier parts.
    """

    def __init__(self) -> None:
        super().__init__(SampleRow)
        self.evaluations: list[EvaluationRow] = []
        self.restores: list[int] = []
        self.num_with_tokens = self.num_scored = 0

    def begin_part(self) -> None:
        """Forgets the ended rows."""
        self.flush()
        self._count_ended(self.ended.values(), 1)
        self.ended.clear()
        self.evaluations.clear()
        self.restores.clear()

    def to_wire(self) -> list[Any]:
        """Plain data, without the rows that ended."""
        self.flush()
        versions = [np.diff(list(column), prepend=0).tolist() for column in
                    (self.versions, self.versions.values())]  # fmt: skip
        return [
            rows_to_wire(self.live.values()), dict(self.counts), dict(self.drop_reasons),
            asdict(self.totals), versions, self.evaluations, self.restores, self.next_uid,
            self.steps_done, self.covered_step, self.num_with_tokens, self.num_scored,
        ]  # fmt: skip

    def read_wire(self, wire: list[Any], ended: list[Any]) -> None:
        """`ended` is `rows_to_wire` of the rows that ended."""
        live, counts, drop_reasons, totals, versions, evaluations, self.restores, *numbers = wire
        (self.next_uid, self.steps_done, self.covered_step, self.num_with_tokens,
         self.num_scored) = numbers  # fmt: skip
        self.live = {row.uid: row for row in rows_from_wire(live)}
        self.ended = {row.uid: row for row in rows_from_wire(ended)}
        self.counts = Counter({SampleState(state): n for state, n in counts.items()})
        self.drop_reasons = Counter(drop_reasons)
        self.totals = Totals(**totals)
        columns = [np.cumsum(column, dtype=np.int64).tolist() for column in versions]
        self.versions = dict(zip(*columns, strict=True))
        self.evaluations = [EvaluationRow(*evaluation) for evaluation in evaluations]
        for row in self.live.values():
            if row.step is not None:
                self._leased.setdefault(row.step, []).append(row)

    def apply(self, event: Event, time_s: float, begin: int, end: int) -> None:
        """Follows an event of a frame. Raises LedgerError for samples that are unknown or ended."""
        self.follow(event, begin, end)
        match event:
            case Restored():
                self.evaluations = [row for row in self.evaluations if row.step <= event.step]
                self.restores.append(event.step)
            case Evaluated():
                of_prompts = ("samples", "num_right")  # they would grow with every evaluation
                outcome = {k: value for k, value in event.outcome.items() if k not in of_prompts}
                self.evaluations = [row for row in self.evaluations if row.step != event.step]
                self.evaluations.append(
                    EvaluationRow(event.step, event.temperature, time_s, outcome)
                )
            case _:
                pass

    def newest_version(self, steps: int) -> int:
        """The weights after `steps` optimizer steps in the history that counts, which published
        them last; 0 if they were never published."""
        return max((version for version, of in self.versions.items() if of == steps), default=0)

    def take_back(self, rows: Iterable[SampleRow]) -> None:
        """Takes samples of earlier parts that the next event, a `Restored`, makes scored again."""
        for row in rows:
            self._count_ended([row], -1)
            self.ended[row.uid] = row

    def _count_ended(self, rows: Iterable[SampleRow], sign: int) -> None:
        for row in rows:
            self.num_with_tokens += sign * (row.num_tokens > 0)
            self.num_scored += sign * (row.reward is not None)
