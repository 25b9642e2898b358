from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final, assert_never

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
)
from umbra.runtime.rollout.ledger.ledger_history import Entry
from umbra.runtime.rollout.ledger.sample_accounts import (
    GroupAccount,
    SampleAccount,
    SampleState,
    Totals,
)
from umbra.runtime.rollout.ledger.token_runs import MAX_TOKENS, TokenRuns

_RUNNING: Final = frozenset({SampleState.RUNNING})
_WAITING: Final = frozenset({SampleState.PENDING, SampleState.PARTIAL})
_OPEN: Final = _WAITING | _RUNNING
_FINISHED: Final = frozenset({SampleState.FINISHED})
_SCORED: Final = frozenset({SampleState.SCORED})
_UNLEASED: Final = _OPEN | _FINISHED | _SCORED
_STORED: Final = ("steps_done", "covered_step", "next_uid", "num_groups", "_last_order_idx")


class LedgerState:
    """The state of all samples, computed from events alone: no clock, no files.

    Groups that can no longer change are folded into counts: all samples are dropped, or trained in
    steps that the newest checkpoint covers. Everything else is kept, including tokens. A refused
    event raises LedgerError and changes nothing.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}  # the optimizer step of each version
        self.steps_done = 0  # in the surviving history
        self.covered_step = 0  # steps that the newest checkpoint covers
        self.evaluation: Evaluated | None = None  # unless the job has gone back since
        self.next_uid = 0  # uid of the next group's first sample
        self.num_groups = 0  # number of groups that were ever admitted
        self.totals = Totals()
        self.counts: Counter[SampleState] = Counter()
        self.drop_reasons: Counter[str] = Counter()
        self._restores = deque[int]()
        self._last_kept_step = math.inf  # tokens of later steps' versions are only counted
        self._released_step = 0  # samples trained before this step have no tokens any more
        self._last_order_idx = -1
        self._samples: dict[int, SampleAccount] = {}
        self._groups: dict[str, GroupAccount] = {}
        self._leased: dict[int, list[SampleAccount]] = {}  # by step, until released
        self._runs = TokenRuns()  # not yet given to their samples

    def apply(self, event: Event) -> None:
        self._apply(event)
        self._distribute()

    def apply_all(self, entries: Iterable[Entry]) -> None:
        """Applies many events, much faster. Accounts that were returned earlier may lag behind the
        last event until an account is asked for."""
        for entry in entries:
            for event in entry.batch.events:
                try:
                    self._apply(event)
                except LedgerError as error:
                    raise LedgerError(f"the ledger at {entry.position}: {error}") from error

    def _apply(self, event: Event) -> None:
        match event:
            case Version():
                self._announce(event.version, event.step)
            case Admitted():
                self._admit(event)
            case Started():
                self._move_all(self._find(event, event.uids, _WAITING), SampleState.RUNNING)
            case Cut():
                self._cut(self._find(event, event.uids, _RUNNING))
            case Tokens():
                self._append(event)
            case PromptGiven():
                self._replace_prompt(event)
            case Reset():
                self._reset(self._find_one(event, event.uid, _OPEN))
            case Recorded():
                self._record(event)
            case Finished():
                self._finish(event)
            case RewardParts():
                self._keep_parts(event)
            case TeacherLogprobs():
                self._keep_teacher_logprobs(event)
            case Scored():
                self._score(event)
            case Leased():
                self._lease(event)
            case Dropped():
                self._drop(self._find(event, event.uids, _UNLEASED), event.reason)
            case Checkpoint():
                self._cover(event)
            case Restored():
                self._restore(event)
            case Evaluated():
                self.evaluation = event
            case _:
                assert_never(event)

    def sample(self, uid: int) -> SampleAccount:
        """The account of a sample that was not folded; raises KeyError otherwise."""
        self._distribute()
        return self._samples[uid]

    def group(self, group_id: str) -> GroupAccount:
        """The account of a group that was not folded; raises KeyError otherwise."""
        self._distribute()
        return self._groups[group_id]

    def groups(self) -> Iterator[GroupAccount]:
        """The groups that were not folded, in order of admission."""
        self._distribute()
        return iter(self._groups.values())

    def scored(self) -> Uids:
        """Uids of samples that have a reward and are not leased."""
        found = [uid for uid, held in self._samples.items() if held.state is SampleState.SCORED]
        return np.asarray(found, np.int64)

    @property
    def next_order_idx(self) -> int:
        """The index in the prompt order of the next group to admit."""
        return self._last_order_idx + 1

    def running(self) -> Uids:
        """Uids of samples that engines had when the history ended; they must be cut first."""
        found = [uid for uid, held in self._samples.items() if held.state is SampleState.RUNNING]
        return np.asarray(found, np.int64)

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
        live = [group for group in self.groups() if not group.is_done]
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
            yield group.to_wire()
            for sample in group.samples:
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
            group = GroupAccount.from_wire(next(items))
            state._groups[group.group_id] = group
            for sample in group.samples:
                sample.fill(next(items))
                state._samples[sample.uid] = sample
                state._runs.admit(sample.uid, next(iter(state._samples)))
                state._runs.observe(sample.uid, sample.state, sample.num_tokens)
                if sample.state is SampleState.LEASED:
                    assert sample.step is not None
                    state._leased.setdefault(sample.step, []).append(sample)
        return state

    def check_integrity(self) -> None:
        held = Counter(sample.state for sample in self._samples.values())
        assert sum(self.counts.values()) == self.next_uid
        assert sum(self.drop_reasons.values()) == self.counts[SampleState.DROPPED]
        for state in SampleState:
            settled = self.counts[state] - held[state]
            assert settled >= 0, state
            assert settled == 0 or state in (SampleState.TRAINED, SampleState.DROPPED), state
        for step, samples in self._leased.items():
            for sample in samples:
                assert sample.step == step, sample.sample_id
                is_done = step < self.steps_done
                assert (sample.state is SampleState.TRAINED) == is_done, sample.sample_id

    def _announce(self, version: int, step: int) -> None:
        if self.versions and version <= max(self.versions):
            raise LedgerError(
                f"version {version} follows version {max(self.versions)}: versions only grow"
            )
        self.versions[version] = step
        self._advance(step)

    def _admit(self, event: Admitted) -> None:
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
        group = GroupAccount(
            first_uid=event.first_uid,
            group_id=event.group_id,
            prompt_id=event.prompt_id,
            epoch=event.epoch,
            order_idx=event.order_idx,
            seeds=event.seeds,
        )
        self._groups[event.group_id] = group
        self.num_groups += 1
        self._last_order_idx = event.order_idx
        for sample in group.samples:
            self._samples[sample.uid] = sample
            self._runs.admit(sample.uid, next(iter(self._samples)))
        self.next_uid += len(group.samples)
        self.counts[SampleState.PENDING] += len(group.samples)

    def _cut(self, samples: Sequence[SampleAccount]) -> None:
        self._move_all(samples, SampleState.PARTIAL)
        self.totals.interruptions += len(samples)
        for sample in samples:
            sample.num_interruptions += 1

    def _append(self, event: Tokens) -> None:
        if not self._runs.add(event, self.versions):
            self._check_runs(event)
            self._runs.put(event)
        if self._runs.num_tokens > MAX_TOKENS:
            self._distribute()
        num_given = int(event.lengths[event.versions == GIVEN].sum())
        self.totals.generated_tokens += len(event.tokens) - num_given
        self.totals.given_tokens += num_given

    def _distribute(self) -> None:
        for uid, version, tokens, logprobs in self._runs.take():
            sample = self._samples.get(uid)
            if sample is None:
                continue  # it was folded
            is_kept = self.versions.get(version, 0) <= self._last_kept_step
            if sample.is_released or not is_kept or not sample.has_tokens:
                sample.count(len(tokens), version)
            else:
                sample.append(tokens, logprobs, version)

    def _check_runs(self, event: Tokens) -> None:
        """Raises LedgerError, unless samples occur twice and each run may follow the one before."""
        self._distribute()
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

    def _replace_prompt(self, event: PromptGiven) -> None:
        self._distribute()
        sample = self._find_one(event, event.uid, _OPEN)
        if sample.num_tokens:
            raise LedgerError(
                f"{sample.sample_id}: the prompt was replaced after {sample.num_tokens} tokens"
            )
        sample.prompt = event.tokens

    def _reset(self, sample: SampleAccount) -> None:
        self._distribute()
        self.totals.resets += 1
        self.totals.reset_tokens += sample.num_tokens
        sample.num_resets += 1
        sample.num_reset_tokens += sample.num_tokens
        self._truncate(sample, 0)
        sample.prompt = None
        self._move(sample, SampleState.PENDING)

    def _record(self, event: Recorded) -> None:
        sample = self._find_one(event, event.uid, _OPEN)
        if event.key in sample.recorded:
            raise LedgerError(f"{sample.sample_id}: {event.key!r} is recorded twice")
        sample.recorded[event.key] = event.value

    def _finish(self, event: Finished) -> None:
        samples = self._find(event, event.uids, _OPEN)
        self._move_all(samples, SampleState.FINISHED)
        for sample, reason in zip(samples, event.reasons, strict=True):
            sample.finish_reason = reason

    def _keep_parts(self, event: RewardParts) -> None:
        samples = self._find(event, event.uids, _FINISHED)
        rows = event.values.reshape(len(samples), len(event.names)).tolist()
        for sample, values in zip(samples, rows, strict=True):
            sample.reward_parts = dict(zip(event.names, values, strict=True))

    def _keep_teacher_logprobs(self, event: TeacherLogprobs) -> None:
        sample = self._find_one(event, event.uid, _FINISHED | _SCORED)
        sample.teacher_logprobs = event.logprobs.copy()  # not a view of a whole frame

    def _score(self, event: Scored) -> None:
        samples = self._find(event, event.uids, _FINISHED)
        self._move_all(samples, SampleState.SCORED)
        for sample, reward in zip(samples, event.rewards.tolist(), strict=True):
            sample.reward = reward

    def _lease(self, event: Leased) -> None:
        samples = self._find(event, event.uids, _SCORED)
        if event.step < self.steps_done:
            raise LedgerError(
                f"samples are leased for step {event.step + 1}, but {self.steps_done} steps are "
                "done"
            )
        whole = sum(
            sample.state is not SampleState.DROPPED
            for group in {sample.group for sample in samples}
            for sample in group.samples
        )
        if whole != len(samples):
            raise LedgerError(
                f"step {event.step + 1}: {len(samples)} samples were leased from groups that have "
                f"{whole}: groups must be leased whole"
            )
        self._move_all(samples, SampleState.LEASED)
        for sample in samples:
            sample.step = event.step
        self._leased.setdefault(event.step, []).extend(samples)

    def _drop(self, samples: Sequence[SampleAccount], reason: str) -> None:
        self._move_all(samples, SampleState.DROPPED)
        self.drop_reasons[reason] += len(samples)
        for sample in samples:
            sample.drop_reason = reason
            sample.release()
        self._fold({sample.group for sample in samples})

    def _cover(self, event: Checkpoint) -> None:
        self._check_version(event.step, event.version)
        if event.step < self.covered_step:
            raise LedgerError(
                f"a checkpoint after {event.step} steps follows one after {self.covered_step}"
            )
        self._advance(event.step)
        self._settle(event.step)

    def _restore(self, event: Restored) -> None:
        self._check_version(event.step, event.version)
        if event.step < self._released_step:
            raise LedgerError(
                f"the job goes back to the checkpoint after {event.step} steps, but tokens trained "
                f"on up to step {self._released_step} were released: replay the ledger with "
                f"restoring_step={event.step}"
            )
        if self._restores and self._restores.popleft() != event.step:
            raise LedgerError(f"`restores` does not list the return to step {event.step}")
        if not self.versions or event.version > max(self.versions):
            self.versions[event.version] = event.step  # it was not announced before the crash
        self.totals.restores += 1
        self.evaluation = None
        for step in [step for step in self._leased if step >= event.step]:
            samples = self._leased.pop(step)
            self._move_all(samples, SampleState.SCORED)
            for sample in samples:
                sample.step = None
        self.steps_done = self.covered_step = min(self.steps_done, event.step)
        self._advance(event.step)
        self._distribute()
        newer = {version for version, step in self.versions.items() if step > event.step}
        for sample in self._samples.values():
            if sample.state in _UNLEASED:
                self._roll_back(sample, sample.first_of(newer))
        self._settle(event.step)

    def _roll_back(self, sample: SampleAccount, num_tokens: int) -> None:
        if num_tokens == sample.num_tokens:
            return
        num_lost = sample.num_tokens - num_tokens
        self.totals.rolled_back_tokens += num_lost
        sample.num_rolled_back += num_lost
        self._truncate(sample, num_tokens)
        sample.reward = None
        sample.reward_parts = {}
        sample.teacher_logprobs = None
        sample.finish_reason = ""
        self._move(sample, SampleState.PARTIAL if num_tokens else SampleState.PENDING)

    def _truncate(self, sample: SampleAccount, num_tokens: int) -> None:
        sample.truncate(num_tokens)
        self._runs.observe(sample.uid, sample.state, num_tokens)

    def _check_version(self, step: int, version: int) -> None:
        known = self.versions.get(version, step)
        if known > step:
            raise LedgerError(
                f"a checkpoint after {step} steps has version {version}, which was announced after "
                f"{known} steps"
            )

    def _advance(self, steps_done: int) -> None:
        for step, samples in self._leased.items():
            if self.steps_done <= step < steps_done:
                self._move_all(samples, SampleState.TRAINED)
        self.steps_done = max(self.steps_done, steps_done)

    def _settle(self, covered_step: int) -> None:
        """Releases samples that were trained before `covered_step` and will not be needed."""
        self.covered_step = covered_step
        limit = min([covered_step, *self._restores])
        self._released_step = max(self._released_step, limit)
        touched: set[GroupAccount] = set()
        for step in [step for step in self._leased if step < limit]:
            for sample in self._leased.pop(step):
                sample.release()
                touched.add(sample.group)
        self._fold(touched)

    def _fold(self, groups: Iterable[GroupAccount]) -> None:
        for group in sorted(groups, key=lambda group: group.first_uid):
            if group.is_settled:
                del self._groups[group.group_id]
                for sample in group.samples:
                    del self._samples[sample.uid]

    def _find(
        self, event: Event, uids: Uids, allowed: frozenset[SampleState]
    ) -> list[SampleAccount]:
        found = [self._find_one(event, uid, allowed) for uid in uids.tolist()]
        if len(set(found)) != len(found):
            raise LedgerError(f"{type(event).__name__}: a sample occurs twice")
        return found

    def _find_one(self, event: Event, uid: int, allowed: frozenset[SampleState]) -> SampleAccount:
        sample = self._samples.get(uid)
        if sample is None:
            problem = "was settled before" if 0 <= uid < self.next_uid else "was never admitted"
            raise LedgerError(f"{type(event).__name__}: uid {uid} {problem}")
        if sample.state not in allowed:
            raise LedgerError(
                f"{type(event).__name__}: {sample.sample_id} is {sample.state}, not "
                f"{' or '.join(sorted(allowed))}"
            )
        return sample

    def _move_all(self, samples: Iterable[SampleAccount], state: SampleState) -> None:
        for sample in samples:
            self._move(sample, state)

    def _move(self, sample: SampleAccount, state: SampleState) -> None:
        self.counts[sample.state] -= 1
        self.counts[state] += 1
        sample.state = state
        self._runs.observe(sample.uid, state)
