"""One row of facts for each sample, without its tokens, from a ledger's events.

`LedgerState` checks that a ledger is valid. Here events are only followed, so that a whole run can
be read quickly. Runs of tokens are the bulk of a ledger; they are counted together, with the next
event that needs a sample's length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

import numpy as np

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.ledger.ledger_events import (
    GIVEN,
    Admitted,
    Checkpoint,
    Cut,
    Dropped,
    Evaluated,
    Event,
    Finished,
    Leased,
    Reset,
    Restored,
    RewardParts,
    Scored,
    Started,
    Tokens,
    Uids,
    Version,
)
from umbra.runtime.rollout.ledger.sample_accounts import SampleState, Totals
from umbra.runtime.rollout.ledger.token_runs import MAX_TOKENS, sort_runs

_UNLEASED: Final = frozenset(SampleState) - {
    SampleState.LEASED,
    SampleState.TRAINED,
    SampleState.DROPPED,
}


class GroupRow(NamedTuple):
    """Facts that one prompt's samples have in common; fields as in `Admitted`."""

    first_uid: int
    group_id: str
    prompt_id: str
    epoch: int
    order_idx: int


class EvaluationRow(NamedTuple):
    step: int
    temperature: float
    time_s: float
    outcome: dict[str, Any]


@dataclass(slots=True, eq=False)
class SampleRow:
    """One sample."""

    group: GroupRow
    uid: int
    seed: int
    begin: int  # byte of the ledger, over all its parts, where the frame with the admission begins
    state: SampleState = SampleState.PENDING
    finished: int | None = None  # byte after the frame that finished it; None if it is not finished
    end: int | None = None  # byte after the frame that trained or dropped it
    finish_reason: str = ""
    drop_reason: str = ""
    drop_cause: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])  # NaN: does not apply
    step: int | None = None  # from 0, that it was leased for or trained in
    num_tokens: int = 0
    interruptions: int = 0
    resets: int = 0
    rolled_back: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def sample_id(self) -> str:
        return f"{self.group.group_id}/{self.uid - self.group.first_uid}"

    def runs(self) -> list[Segment]:
        stops = [*(start for start, _ in self.segments[1:]), self.num_tokens]
        return [
            Segment(start, stop, version)
            for (start, version), stop in zip(self.segments, stops, strict=False)
        ]

    def facts(self) -> dict[str, Any]:
        """Plain data for people. The step is counted from 1, as in metrics.jsonl."""
        return {
            "uid": self.uid,
            "sample_id": self.sample_id,
            "group_id": self.group.group_id,
            "prompt_id": self.group.prompt_id,
            "epoch": self.group.epoch,
            "place": self.group.order_idx,
            "seed": self.seed,
            "state": str(self.state),
            "finish_reason": self.finish_reason,
            "reward": self.reward,
            "reward_parts": {
                name: None if math.isnan(value) else value
                for name, value in self.reward_parts.items()
            },
            "step": None if self.step is None else self.step + 1,
            "drop_reason": self.drop_reason,
            "drop_detail": ": ".join(filter(None, (self.drop_reason, self.drop_cause))),
            "num_tokens": self.num_tokens,
            "interruptions": self.interruptions,
            "resets": self.resets,
            "rolled_back_tokens": self.rolled_back,
        }

    def truncate(self, num_tokens: int) -> None:
        self.segments = [run for run in self.segments if run[0] < num_tokens]
        self.num_tokens = num_tokens


_COLUMNS: Final = tuple(column.name for column in fields(SampleRow))[1:]


def rows_to_wire(rows: Iterable[SampleRow]) -> list[Any]:
    held = list(rows)
    groups = {row.group.first_uid: row.group for row in held}
    of_group = [row.group.first_uid for row in held]
    return [list(groups.values()), of_group, *([getattr(r, c) for r in held] for c in _COLUMNS)]


def rows_from_wire(wire: list[Any]) -> list[SampleRow]:
    groups = {first_uid: GroupRow(first_uid, *rest) for first_uid, *rest in wire[0]}
    rows = [SampleRow(groups[of], *values) for of, *values in zip(*wire[1:], strict=True)]
    for row in rows:
        row.state = SampleState(row.state)
        row.segments = [(start, version) for start, version in row.segments]
    return rows


class SampleTable:
    """The rows of samples that may change, and of those that ended in the part that is read.

    Attributes:
        live: by uid, neither trained nor dropped.
        ended: by uid, trained or dropped since `begin_part`.
        counts: the samples of all parts by state.
        versions: the optimizer step of each version.
        evaluations, restores: the evaluations, and the steps of the `Restored`, of this part.
        num_with_tokens, num_scored: of the samples that ended in earlier parts.
    """

    def __init__(self) -> None:
        self.live: dict[int, SampleRow] = {}
        self.ended: dict[int, SampleRow] = {}
        self.counts: Counter[SampleState] = Counter()
        self.drop_reasons: Counter[str] = Counter()
        self.totals = Totals()
        self.versions: dict[int, int] = {}
        self.evaluations: list[EvaluationRow] = []
        self.restores: list[int] = []
        self.next_uid = self.steps_done = self.covered_step = 0
        self.num_with_tokens = self.num_scored = 0
        self._leased: dict[int, list[SampleRow]] = {}
        self._runs: list[Tokens] = []  # not counted yet
        self._num_waiting = 0  # tokens of these

    def begin_part(self) -> None:
        """Forgets the ended rows."""
        self.flush()
        self._count_ended(self.ended.values(), 1)
        self.ended.clear()
        self.evaluations.clear()
        self.restores.clear()

    def rows(self) -> Iterator[SampleRow]:
        yield from self.live.values()
        yield from self.ended.values()

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
        match event:
            case Tokens():
                self._runs.append(event)
                self._num_waiting += len(event.tokens)
                if self._num_waiting > MAX_TOKENS:
                    self.flush()
            case Admitted():
                self._admit(event, begin)
            case Started():
                self._move(self._find(event.uids), SampleState.RUNNING)
            case Cut():
                rows = self._find(event.uids)
                self._move(rows, SampleState.PARTIAL)
                self.totals.interruptions += len(rows)
                for row in rows:
                    row.interruptions += 1
            case Finished():
                rows = self._find(event.uids)
                self._move(rows, SampleState.FINISHED)
                for row, reason in zip(rows, event.reasons, strict=True):
                    row.finish_reason, row.finished = reason, end
            case RewardParts():
                rows = self._find(event.uids)
                of_rows = event.values.reshape(len(rows), len(event.names)).tolist()
                for row, values in zip(rows, of_rows, strict=True):
                    row.reward_parts = dict(zip(event.names, values, strict=True))
            case Scored():
                rows = self._find(event.uids)
                self._move(rows, SampleState.SCORED)
                for row, reward in zip(rows, event.rewards.tolist(), strict=True):
                    row.reward = reward
            case Leased():
                rows = self._find(event.uids)
                self._move(rows, SampleState.LEASED)
                self._leased.setdefault(event.step, []).extend(rows)
                for row in rows:
                    row.step = event.step
            case Dropped():
                rows = self._find(event.uids)
                self.drop_reasons[event.reason] += len(rows)
                for row in rows:
                    row.drop_reason, row.drop_cause = event.reason, event.cause
                self._end(rows, SampleState.DROPPED, end)
            case Reset():
                self._reset(event)
            case Version():
                self.versions[event.version] = event.step
                self._advance(event.step, end)
            case Checkpoint():
                self.covered_step = event.step
                self._advance(event.step, end)
            case Restored():
                self._restore(event, end)
            case Evaluated():
                of_prompts = ("samples", "num_right")  # they would grow with every evaluation
                outcome = {k: value for k, value in event.outcome.items() if k not in of_prompts}
                self._drop_evaluations(lambda step: step == event.step)
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

    def flush(self) -> None:
        """Counts the tokens of the events so far."""
        events, self._runs, self._num_waiting = self._runs, [], 0
        if not any(len(event.uids) for event in events):
            return
        order, uids, versions, lasts = sort_runs(events)
        starts = np.concatenate([event.starts for event in events])[order]
        lengths = np.concatenate([event.lengths for event in events])[order]
        num_given = int(lengths[versions == GIVEN].sum())
        self.totals.given_tokens += num_given
        self.totals.generated_tokens += int(lengths.sum()) - num_given
        firsts = np.append(0, lasts[:-1] + 1)
        stops = starts + lengths
        is_torn = starts[1:] != stops[:-1]
        is_torn[lasts[:-1]] = False
        if is_torn.any():
            raise LedgerError(f"tokens of the sample with uid {uids[1:][is_torn][0]} are missing")
        columns = (uids[firsts], starts[firsts], stops[lasts], versions[firsts])
        for uid, start, stop, version in zip(*(c.tolist() for c in columns), strict=True):
            row = self.live.get(uid) or self.ended.get(uid)
            if row is None or row.num_tokens != start:
                raise LedgerError(
                    f"tokens of the sample with uid {uid} begin at {start}; it has "
                    f"{'ended' if row is None else row.num_tokens}"
                )
            row.num_tokens = stop
            if not row.segments or row.segments[-1][1] != version:
                row.segments.append((start, version))

    def _admit(self, event: Admitted, begin: int) -> None:
        uid = event.first_uid
        group = GroupRow(uid, event.group_id, event.prompt_id, event.epoch, event.order_idx)
        for seed in event.seeds.tolist():
            self.live[uid] = SampleRow(group, uid, seed, begin)
            uid += 1
        self.counts[SampleState.PENDING] += len(event.seeds)
        self.next_uid = uid

    def _reset(self, event: Reset) -> None:
        self.flush()
        (row,) = rows = self._find([event.uid])
        self.totals.resets += 1
        self.totals.reset_tokens += row.num_tokens
        row.resets += 1
        row.truncate(0)
        self._move(rows, SampleState.PENDING)

    def _advance(self, steps_done: int, end: int) -> None:
        self.steps_done = max(self.steps_done, steps_done)
        for step in [step for step in self._leased if step < steps_done]:
            self._end(self._leased.pop(step), SampleState.TRAINED, end)

    def _restore(self, event: Restored, end: int) -> None:
        self.flush()
        self.totals.restores += 1
        self.versions.setdefault(event.version, event.step)
        self._drop_evaluations(lambda step: step > event.step)
        leased = [self._leased.pop(step) for step in list(self._leased) if step >= event.step]
        again = [row for rows in leased for row in rows]
        trained = [r for r in self.ended.values() if r.step is not None and r.step >= event.step]
        for row in trained:
            self.live[row.uid] = self.ended.pop(row.uid)
            row.end = None
        again += trained
        self._move(again, SampleState.SCORED)
        for row in again:
            row.step = None
        self.restores.append(event.step)
        self.steps_done = self.covered_step = event.step
        self._advance(event.step, end)
        newer = {version for version, step in self.versions.items() if step > event.step}
        for row in self.live.values():
            if row.state in _UNLEASED:
                self._roll_back(row, newer)

    def _roll_back(self, row: SampleRow, newer: set[int]) -> None:
        stop = next((start for start, version in row.segments if version in newer), row.num_tokens)
        if stop == row.num_tokens:
            return
        self.totals.rolled_back_tokens += row.num_tokens - stop
        row.rolled_back += row.num_tokens - stop
        row.truncate(stop)
        row.reward, row.reward_parts, row.finished = None, {}, None
        row.finish_reason = ""
        self._move([row], SampleState.PARTIAL if stop else SampleState.PENDING)

    def _drop_evaluations(self, is_old: Callable[[int], bool]) -> None:
        self.evaluations = [found for found in self.evaluations if not is_old(found.step)]

    def _count_ended(self, rows: Iterable[SampleRow], sign: int) -> None:
        for row in rows:
            self.num_with_tokens += sign * (row.num_tokens > 0)
            self.num_scored += sign * (row.reward is not None)

    def _end(self, rows: list[SampleRow], state: SampleState, end: int) -> None:
        self._move(rows, state)
        for row in rows:
            row.end = end
            self.ended[row.uid] = self.live.pop(row.uid)

    def _find(self, uids: Uids | list[int]) -> list[SampleRow]:
        try:
            return [self.live[uid] for uid in np.asarray(uids).tolist()]
        except KeyError as error:
            raise LedgerError(f"an event is about the sample with uid {error}, which has ended or "
                              "was never admitted") from error  # fmt: skip

    def _move(self, rows: list[SampleRow], state: SampleState) -> None:
        for row in rows:
            self.counts[row.state] -= 1
            row.state = state
        self.counts[state] += len(rows)
