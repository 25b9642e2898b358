from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from umbra.runtime.errors import LedgerError
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
    PromptGiven,
    Recorded,
    Reset,
    Restored,
    RewardParts,
    Scored,
    Started,
    TeacherLogprobs,
    Tokens,
    Uids,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import Entry
from umbra.runtime.rollout.ledger.sample_accounts import (
    GroupRow,
    SampleAccount,
    SampleState,
    Totals,
)
from umbra.runtime.rollout.ledger.sample_states import UNLEASED, SampleStates
from umbra.runtime.rollout.ledger.token_runs import JoinedRuns, RunColumns

_RUNNING: Final = frozenset({SampleState.RUNNING})
_WAITING: Final = frozenset({SampleState.PENDING, SampleState.PARTIAL})
_OPEN: Final = _WAITING | _RUNNING
_FINISHED: Final = frozenset({SampleState.FINISHED})
_SCORED: Final = frozenset({SampleState.SCORED})
_ALLOWED: Final[Mapping[type[Event], frozenset[SampleState]]] = {
    Started: _WAITING,
    Cut: _RUNNING,
    PromptGiven: _OPEN,
    Reset: _OPEN,
    Recorded: _OPEN,
    Finished: _OPEN,
    RewardParts: _FINISHED,
    TeacherLogprobs: _FINISHED | _SCORED,
    Scored: _FINISHED,
    Leased: _SCORED,
    Dropped: UNLEASED,
}
"""The states of samples in which an event about them is possible."""
_STORED: Final = ("steps_done", "covered_step", "next_uid", "num_groups", "_last_order_idx")


class LedgerState(SampleStates[SampleAccount]):
    """The state of all samples, computed from events alone: no clock, no files.

    Groups that can no longer change are folded into counts: all samples are dropped, or trained in
    steps that the newest checkpoint covers. Everything else is kept, including tokens. A refused
    event raises LedgerError and changes nothing.
    """

    def __init__(self) -> None:
        super().__init__(SampleAccount)
        self.evaluation: Evaluated | None = None  # unless the job has gone back since
        self.num_groups = 0  # number of groups that were ever admitted
        self._restores = deque[int]()
        self._last_kept_step = math.inf  # tokens of later steps' versions are only counted
        self._released_step = 0  # samples trained before this step have no tokens any more
        self._last_order_idx = -1
        self._groups: dict[str, Sequence[SampleAccount]] = {}  # in order of admission
        self._columns = RunColumns()

    def apply(self, event: Event) -> None:
        self._apply(event)
        self.flush()

    def apply_all(self, entries: Iterable[Entry]) -> None:
        """Applies many events, much faster."""
        for entry in entries:
            for event in entry.batch.events:
                try:
                    self._apply(event)
                except LedgerError as error:
                    raise LedgerError(f"the ledger at {entry.position}: {error}") from error
        self.flush()

    def _apply(self, event: Event) -> None:
        if isinstance(event, Tokens):
            if not self._columns.fit(event, self.versions):
                self._check_runs(event)
            self._columns.put(event)
            self.follow(event)
            return
        if isinstance(event, PromptGiven | Reset):
            self.flush()
        samples = self._check(event)
        if isinstance(event, Reset):
            samples[0].reset_tokens += samples[0].num_tokens
        self.follow(event)
        for sample in samples:
            self._columns.observe(sample.uid, sample.state)
        match event:
            case Admitted():
                self._hold([self.live[uid] for uid in range(event.first_uid, self.next_uid)])
                self.num_groups += 1
                self._last_order_idx = event.order_idx
            case PromptGiven():
                samples[0].prompt = event.tokens
            case Reset():
                samples[0].prompt = None
                self._columns.observe(event.uid, SampleState.PENDING, 0)
            case Recorded():
                samples[0].recorded[event.key] = event.value
            case TeacherLogprobs():
                samples[0].teacher_logprobs = event.logprobs.copy()  # not a view of a whole frame
            case Dropped():
                self._release(samples)
            case Checkpoint():
                self._settle()
            case Restored():
                self.evaluation = None
                for sample in self.live.values():
                    self._columns.observe(sample.uid, sample.state, sample.num_tokens)
                    if sample.state in _OPEN:
                        sample.teacher_logprobs = None  # they were of all its tokens
                self._settle()
            case Evaluated():
                self.evaluation = event
            case _:
                pass

    def sample(self, uid: int) -> SampleAccount:
        """The account of a sample that was not folded; raises KeyError otherwise."""
        return self.live[uid] if uid in self.live else self.ended[uid]

    def groups(self) -> Iterator[Sequence[SampleAccount]]:
        """The samples of each group that was not folded, in order of admission."""
        return iter(self._groups.values())

    def scored(self) -> Uids:
        """Uids of samples that have a reward and are not leased."""
        return self._live_in(SampleState.SCORED)

    @property
    def next_order_idx(self) -> int:
        """The index in the prompt order of the next group to admit."""
        return self._last_order_idx + 1

    def running(self) -> Uids:
        """Uids of samples that engines had when the history ended; they must be cut first."""
        return self._live_in(SampleState.RUNNING)

    def _live_in(self, state: SampleState) -> Uids:
        return uids_of(*(uid for uid, sample in self.live.items() if sample.state is state))

    def foresee(self, restores: Iterable[int], last: int | None = None) -> None:
        """Takes the steps of all `Restored` events to come, in order: tokens that one of them needs
        are kept even if a checkpoint covers them. Otherwise, going back behind the newest
        checkpoint is refused. `last` is the step of one that the caller will apply after them. It
        cuts off all tokens of later steps' versions, so these are only counted."""
        self._restores = deque(restores)
        if last is not None:
            self._restores.append(last)
        self._last_kept_step = math.inf if last is None else last

    def to_wire(self) -> Iterator[list[Any]]:
        """The state as plain data, with trained and dropped groups as counts. It is bounded by its
        live groups, and cannot go back to an earlier step than `steps_done`."""
        live = [group for group in self.groups() if any(s.uid in self.live for s in group)]
        evaluation = self.evaluation
        yield [
            {name: getattr(self, name) for name in _STORED},
            np.asarray([*self.versions.items()], np.int64).tobytes(),
            asdict(self.totals),
            {str(state): count for state, count in self.counts.items()},
            dict(self.drop_reasons),
            evaluation and [evaluation.step, evaluation.temperature, evaluation.outcome],
            len(live),
        ]
        for group in live:
            yield [*group[0].group, [sample.seed for sample in group]]
            for sample in group:
                yield sample.to_wire()

    @classmethod
    def from_wire(cls, items: Iterator[Any]) -> LedgerState:
        state = cls()
        stored, versions, totals, counts, drop_reasons, evaluation, num_live = next(items)
        for name in _STORED:
            setattr(state, name, stored[name])
        state._released_step = state.steps_done
        flat: list[int] = np.frombuffer(versions, np.int64).tolist()
        state.versions = dict(zip(flat[::2], flat[1::2], strict=True))
        state.totals = Totals(**totals)
        state.counts.update({SampleState(name): count for name, count in counts.items()})
        state.drop_reasons.update(drop_reasons)
        state.evaluation = evaluation and Evaluated(*evaluation)
        for _ in range(num_live):
            *facts, seeds = next(items)
            group = GroupRow(*facts)
            numbered = enumerate(seeds, group.first_uid)
            samples = [SampleAccount(group, uid, seed, 0) for uid, seed in numbered]
            state._hold(samples)
            for sample in samples:
                sample.fill(next(items))
                state._columns.observe(sample.uid, sample.state, sample.num_tokens)
                held = state.ended if sample.state is SampleState.DROPPED else state.live
                held[sample.uid] = sample
                if sample.state is SampleState.LEASED:
                    assert sample.step is not None
                    state._leased.setdefault(sample.step, []).append(sample)
        return state

    def check_integrity(self) -> None:
        held = Counter(sample.state for sample in self.rows())
        assert sum(self.counts.values()) == self.next_uid
        assert sum(self.drop_reasons.values()) == self.counts[SampleState.DROPPED]
        for state in SampleState:
            settled = self.counts[state] - held[state]
            assert settled >= 0, state
            assert settled == 0 or state in (SampleState.TRAINED, SampleState.DROPPED), state
        for step, samples in self._leased.items():
            assert step >= self.steps_done
            for sample in samples:
                assert (sample.step, sample.state) == (step, SampleState.LEASED), sample.sample_id

    def _check(self, event: Event) -> Sequence[SampleAccount]:
        """The samples that an event is about. Raises LedgerError if it cannot happen to them."""
        samples = self._find_in(event, _uids_of(event))
        match event:
            case Version() if self.versions and event.version <= max(self.versions):
                raise LedgerError(
                    f"version {event.version} follows version {max(self.versions)}: versions only "
                    "grow"
                )
            case Admitted():
                self._check_group(event)
            case PromptGiven() if samples[0].num_tokens:
                raise LedgerError(
                    f"{samples[0].sample_id}: the prompt was replaced after "
                    f"{samples[0].num_tokens} tokens"
                )
            case Recorded() if event.key in samples[0].recorded:
                raise LedgerError(f"{samples[0].sample_id}: {event.key!r} is recorded twice")
            case Leased():
                self._check_lease(event, samples)
            case Checkpoint():
                self._check_version(event)
                if event.step < self.covered_step:
                    raise LedgerError(
                        f"a checkpoint after {event.step} steps follows one after "
                        f"{self.covered_step}"
                    )
            case Restored():
                self._check_version(event)
                if event.step < self._released_step:
                    raise LedgerError(
                        f"the job goes back to the checkpoint after {event.step} steps, but tokens "
                        f"trained on up to step {self._released_step} were released: replay the "
                        f"ledger with restoring_step={event.step}"
                    )
                if self._restores and self._restores.popleft() != event.step:
                    raise LedgerError(f"`restores` does not list the return to step {event.step}")
            case _:
                pass
        return samples

    def _check_group(self, event: Admitted) -> None:
        if event.first_uid != self.next_uid:
            raise LedgerError(
                f"{event.group_id}: admitted as uid {event.first_uid}, expected {self.next_uid}"
            )
        if event.group_id in self._groups:
            raise LedgerError(f"{event.group_id} is admitted twice")
        if event.order_idx <= self._last_order_idx:
            raise LedgerError(
                f"{event.group_id}: admitted for index {event.order_idx} in the data after "
                f"index {self._last_order_idx}"
            )

    def _check_lease(self, event: Leased, samples: Sequence[SampleAccount]) -> None:
        if event.step < self.steps_done:
            raise LedgerError(
                f"samples are leased for step {event.step + 1}, but {self.steps_done} steps are "
                "done"
            )
        whole = sum(
            sample.state is not SampleState.DROPPED
            for group in self._groups_of(samples)
            for sample in group
        )
        if whole != len(samples):
            raise LedgerError(
                f"step {event.step + 1}: {len(samples)} samples were leased from groups that have "
                f"{whole}: groups must be leased whole"
            )

    def _check_version(self, event: Checkpoint | Restored) -> None:
        known = self.versions.get(event.version, event.step)
        if known > event.step:
            raise LedgerError(
                f"a checkpoint after {event.step} steps has version {event.version}, which was "
                f"announced after {known} steps"
            )

    def _check_runs(self, event: Tokens) -> None:
        """Raises LedgerError, unless samples occur twice and each run may follow the one before."""
        self.flush()
        uids, starts = event.uids.tolist(), event.starts.tolist()
        bounds, versions = event.offsets.tolist(), event.versions.tolist()
        lengths: dict[int, int] = {}
        for uid, start, begin, end, version in zip(
            uids, starts, bounds, bounds[1:], versions, strict=False
        ):
            sample = self._find_one(event, uid, _OPEN if version == GIVEN else _RUNNING)
            length = lengths.get(uid, sample.num_tokens)
            if start != length:
                problem = "are missing before it" if start > length else "are there already"
                raise LedgerError(
                    f"{sample.sample_id}: a run of tokens begins at {start} in a completion of "
                    f"{length}: {abs(start - length)} tokens {problem}"
                )
            if version != GIVEN and version not in self.versions:
                raise LedgerError(f"{sample.sample_id}: tokens have the unknown version {version}")
            lengths[uid] = length + end - begin

    def _extend(self, runs: JoinedRuns) -> None:
        tokens, logprobs = runs.contents()
        start = 0
        for uid, num_tokens, version in runs:
            stop = start + num_tokens
            sample = self.live.get(uid) or self.ended.get(uid)
            if sample is not None:  # else it was folded
                if self.versions.get(version, 0) <= self._last_kept_step:
                    sample.put(tokens[start:stop], logprobs[start:stop])
                sample.extend(num_tokens, version)
            start = stop

    def _hold(self, group: Sequence[SampleAccount]) -> None:
        self._groups[group[0].group.group_id] = group
        oldest_uid = next(iter(self._groups.values()))[0].uid
        for sample in group:
            self._columns.admit(sample.uid, oldest_uid)

    def _settle(self) -> None:
        """Releases samples that were trained before the newest checkpoint and will not be needed
        by a return to an earlier one."""
        limit = min([self.covered_step, *self._restores])
        if limit > self._released_step:  # else a return to an earlier one keeps all that have ended
            self._released_step = limit
            ended = self.ended.values()
            self._release([held for held in ended if held.step is not None and held.step < limit])

    def _release(self, samples: Sequence[SampleAccount]) -> None:
        """Frees contents, and folds groups to which nothing can happen any more."""
        for sample in samples:
            sample.release()
        for group in self._groups_of(samples):
            if all(sample.is_released for sample in group):
                del self._groups[group[0].group.group_id]
                for sample in group:
                    del self.ended[sample.uid]

    def _groups_of(self, samples: Sequence[SampleAccount]) -> list[Sequence[SampleAccount]]:
        return [self._groups[name] for name in {sample.group.group_id for sample in samples}]

    def _find_in(self, event: Event, uids: Sequence[int]) -> list[SampleAccount]:
        allowed = _ALLOWED.get(type(event), frozenset())
        found = [self._find_one(event, uid, allowed) for uid in uids]
        if len(set(uids)) != len(uids):
            raise LedgerError(f"{type(event).__name__}: a sample occurs twice")
        return found

    def _find_one(self, event: Event, uid: int, allowed: frozenset[SampleState]) -> SampleAccount:
        sample = self.live.get(uid) or self.ended.get(uid)
        if sample is None:
            problem = "was settled before" if 0 <= uid < self.next_uid else "was never admitted"
            raise LedgerError(f"{type(event).__name__}: uid {uid} {problem}")
        if sample.state not in allowed:
            raise LedgerError(
                f"{type(event).__name__}: {sample.sample_id} is {sample.state}, not "
                f"{' or '.join(sorted(allowed))}"
            )
        return sample


def _uids_of(event: Event) -> Sequence[int]:
    match event:
        case Started() | Cut() | Finished() | RewardParts() | Scored() | Leased() | Dropped():
            return event.uids.tolist()
        case PromptGiven() | Reset() | Recorded() | TeacherLogprobs():
            return [event.uid]
        case _:
            return []
