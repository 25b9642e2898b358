from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

import numpy as np

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Checkpoint,
    Cut,
    Dropped,
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
from umbra.runtime.rollout.ledger.sample_accounts import GroupRow, SampleRow, SampleState, Totals
from umbra.runtime.rollout.ledger.token_runs import MAX_TOKENS, JoinedRuns

Row = TypeVar("Row", bound=SampleRow)

UNLEASED: Final = frozenset(SampleState) - {
    SampleState.LEASED,
    SampleState.TRAINED,
    SampleState.DROPPED,
}


class SampleStates(Generic[Row]):
    """Follows the events of a valid ledger: what each does to the samples. `LedgerState` checks
    events first, and keeps contents; `SampleTable` follows them alone, and reads a run quickly.

    Runs of tokens are the bulk of a ledger. They are counted together, with the next event that
    needs a sample's length.

    Attributes:
        live: by uid, neither trained nor dropped.
        ended: by uid, trained or dropped, until nobody needs them.
        counts: all samples by state.
        versions: the optimizer step of each version.
        steps_done: optimizer steps in the surviving history.
        covered_step: steps that the newest checkpoint covers.
        next_uid: of the next group's first sample.
    """

    def __init__(self, row_type: type[Row]) -> None:
        self.live: dict[int, Row] = {}
        self.ended: dict[int, Row] = {}
        self.counts: Counter[SampleState] = Counter()
        self.drop_reasons: Counter[str] = Counter()
        self.totals = Totals()
        self.versions: dict[int, int] = {}
        self.next_uid = self.steps_done = self.covered_step = 0
        self._row_type = row_type
        self._leased: dict[int, list[Row]] = {}  # by step
        self._runs: list[Tokens] = []  # not counted yet
        self._num_waiting = 0  # tokens of these

    def rows(self) -> Iterator[Row]:
        yield from self.live.values()
        yield from self.ended.values()

    def follow(self, event: Event, begin: int = 0, end: int = 0) -> None:
        """`begin` and `end` are bytes of the event's frame, as in `SampleRow`. Raises LedgerError
        for samples that are unknown or ended."""
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
            case _:
                pass

    def flush(self) -> None:
        """Counts the tokens of the events so far."""
        events, self._runs, self._num_waiting = self._runs, [], 0
        if any(len(event.uids) for event in events):
            runs = JoinedRuns(events)
            self.totals.given_tokens += runs.num_given
            self.totals.generated_tokens += runs.num_generated
            self._extend(runs)

    def _extend(self, runs: JoinedRuns) -> None:
        for (uid, num_tokens, version), start in zip(runs, runs.starts(), strict=True):
            row = self.live.get(uid) or self.ended.get(uid)
            if row is None or row.num_tokens != start:
                raise LedgerError(
                    f"tokens of the sample with uid {uid} begin at {start}; it has "
                    f"{'ended' if row is None else row.num_tokens}"
                )
            row.extend(num_tokens, version)

    def _admit(self, event: Admitted, begin: int) -> None:
        uid = event.first_uid
        group = GroupRow(uid, event.group_id, event.prompt_id, event.epoch, event.order_idx)
        for seed in event.seeds.tolist():
            self.live[uid] = self._row_type(group, uid, seed, begin)
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
        self.versions.setdefault(event.version, event.step)  # not announced before a crash
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
        self.steps_done = self.covered_step = event.step
        self._advance(event.step, end)
        newer = {version for version, step in self.versions.items() if step > event.step}
        for row in self.live.values():
            if row.state in UNLEASED:
                self._roll_back(row, row.first_of(newer))

    def _roll_back(self, row: Row, num_tokens: int) -> None:
        if num_tokens == row.num_tokens:
            return
        self.totals.rolled_back_tokens += row.num_tokens - num_tokens
        row.rolled_back += row.num_tokens - num_tokens
        row.truncate(num_tokens)
        row.reward, row.reward_parts, row.finished = None, {}, None
        row.finish_reason = ""
        self._move([row], SampleState.PARTIAL if num_tokens else SampleState.PENDING)

    def _end(self, rows: Sequence[Row], state: SampleState, end: int) -> None:
        self._move(rows, state)
        for row in rows:
            row.end = end
            self.ended[row.uid] = self.live.pop(row.uid)

    def _find(self, uids: Uids | list[int]) -> list[Row]:
        try:
            return [self.live[uid] for uid in np.asarray(uids).tolist()]
        except KeyError as error:
            raise LedgerError(f"an event is about the sample with uid {error}, which has ended or "
                              "was never admitted") from error  # fmt: skip

    def _move(self, rows: Sequence[Row], state: SampleState) -> None:
        for row in rows:
            self.counts[row.state] -= 1
            row.state = state
        self.counts[state] += len(rows)
