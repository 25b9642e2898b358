"""The effect of events on samples, compared with a naive model, and refused events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_samples import account_of, admitted, life_of_a_group, runs_of, wire, wire_of

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import (
    Batch,
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
    Version,
    decode_batches,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import BEGIN, Entry
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import SampleAccount, SampleState


def entries_of(events: Sequence[Event]) -> list[Entry]:
    return [Entry(BEGIN, 0, Batch(0.0, tuple(events)))]


def state_of(*events: Event, restores: Sequence[int] = ()) -> LedgerState:
    state = LedgerState()
    state.foresee(restores)
    for event in events:
        state.apply(event)
    state.check_integrity()
    return state


BEGUN: list[Event] = [Version(0, 0), admitted(0, "a"), Started(uids_of(0, 1))]


def test_a_leased_sample_is_trained_once_its_step_is_done_and_folded_once_covered() -> None:
    state = state_of(Version(0, 0), *life_of_a_group(0, "a", 0, 0))
    assert state.sample(0).state is SampleState.LEASED

    state.apply(Version(1, 1))
    assert state.sample(0).state is SampleState.TRAINED
    assert state.sample(0).tokens.tolist() == [1, 2, 3]

    state.apply(Checkpoint(1, 1))
    assert state.counts[SampleState.TRAINED] == 2
    assert not list(state.groups())
    state.check_integrity()


def test_a_restored_checkpoint_reverts_later_leases_and_cuts_newer_tokens() -> None:
    state = state_of(
        Version(0, 0),
        *life_of_a_group(0, "a", 0, 0),
        Version(1, 1),
        Checkpoint(1, 1),
        *life_of_a_group(2, "b", 1, 1),
        Version(2, 2),
        *life_of_a_group(4, "c", 2, 2)[:-1],
        admitted(6, "d"),
        Started(uids_of(6, 7)),
        runs_of((6, 0, 1, [1, 2]), (6, 2, -1, [3]), (6, 3, 2, [4, 5]), (6, 5, -1, [6])),
        Restored(1, 1),
    )

    assert state.steps_done == 1
    b, c, d = state.sample(2), state.sample(4), state.sample(6)
    assert (b.state, b.step, b.reward, b.rolled_back) == (SampleState.SCORED, None, 1.0, 0)
    assert (c.state, c.reward, c.num_tokens) == (SampleState.PENDING, None, 0)
    assert (d.state, d.tokens.tolist(), d.rolled_back) == (SampleState.PARTIAL, [1, 2, 3], 3)
    assert (state.totals.generated_tokens, state.totals.given_tokens) == (3 * 5 + 4, 2)
    assert state.totals.rolled_back_tokens == 3 + 2 + 3
    assert state.sample(7).state is SampleState.RUNNING
    assert state.counts[SampleState.TRAINED] == 2


@pytest.mark.parametrize("is_scored", [False, True])
def test_teacher_logprobs_last_until_tokens_are_cut_off(is_scored: bool) -> None:
    *life, scored, _leased = life_of_a_group(0, "a", 1, 1)
    found = np.asarray([-0.5, -1.5, -2.5], np.float32)
    events: list[Event] = [Version(0, 0), Version(1, 1), *life, *([scored] if is_scored else [])]
    state = state_of(*events, TeacherLogprobs(0, found))

    again = LedgerState.from_wire(iter(list(state.to_wire())))

    for held in (state, again):
        assert str(held.sample(0).teacher_logprobs) == str(found)
        assert held.sample(1).teacher_logprobs is None
    state.apply(Restored(0, 0))
    assert state.sample(0).teacher_logprobs is None


def test_going_back_behind_the_newest_checkpoint_needs_a_replay_that_knows() -> None:
    events: list[Event] = [
        Version(0, 0),
        *life_of_a_group(0, "a", 0, 0),
        Version(1, 1),
        Checkpoint(1, 1),
        *life_of_a_group(2, "b", 1, 1),
        Version(2, 2),
        Checkpoint(2, 2),
    ]

    with pytest.raises(LedgerError, match="restoring_step=1"):
        state_of(*events, Restored(1, 1))
    state = state_of(*events, Restored(1, 1), restores=[1])

    assert state.counts[SampleState.TRAINED] == 2
    assert state.sample(2).state is SampleState.SCORED
    assert state.sample(2).tokens.tolist() == [1, 2, 3]
    state.apply(Leased(1, uids_of(2, 3)))
    state.apply(Version(3, 2))
    state.apply(Checkpoint(2, 3))
    assert not list(state.groups())


class Watched(dict[int, SampleAccount]):
    num_passes = 0

    def values(self) -> Any:
        self.num_passes += 1
        return super().values()


def test_checkpoints_before_a_return_do_not_each_go_through_all_that_was_trained() -> None:
    """A replay took minutes where a run with many checkpoints went back to an early one."""
    state = LedgerState()
    state.foresee([0])
    state.ended = ended = Watched()
    state.apply(Version(0, 0))

    for step in range(5):
        for event in life_of_a_group(2 * step, f"g{step}", step, step):
            state.apply(event)
        state.apply(Version(step + 1, step + 1))
        state.apply(Checkpoint(step + 1, step + 1))

    assert (len(ended), ended.num_passes) == (10, 0)
    state.apply(Restored(0, 0))
    assert state.counts[SampleState.TRAINED] == 0


def test_a_checkpoint_whose_version_was_lost_in_a_crash_can_be_restored() -> None:
    state = state_of(Version(0, 0), *life_of_a_group(0, "a", 0, 0), Restored(1, 1), Version(2, 2))

    assert state.counts[SampleState.TRAINED] == 2
    assert state.versions == {0: 0, 1: 1, 2: 2}


def test_a_step_without_a_version_of_its_own_is_restored_under_the_last_one() -> None:
    state = state_of(Version(0, 0), Version(1, 1), Restored(2, 1))

    assert (state.steps_done, state.versions) == (2, {0: 0, 1: 1})


def test_the_last_evaluation_is_known_until_the_job_goes_back() -> None:
    first, second = Evaluated(0, 0.0, {"accuracy": 0.1}), Evaluated(1, 0.0, {"accuracy": 0.2})
    events = [Version(0, 0), first, Version(1, 1), second]

    assert state_of(*events[:3]).evaluation == first
    assert state_of(*events).evaluation == second
    assert state_of(*events, Restored(1, 1)).evaluation is None


def test_what_ctx_once_recorded_survives_a_reset() -> None:
    state = state_of(
        *BEGUN,
        PromptGiven(0, np.asarray([8, 9], np.int32)),
        Recorded(0, "tool", [1]),
        runs_of((0, 0, 0, [1, 2])),
        Reset(0, "its process died"),
    )

    sample = state.sample(0)
    assert (sample.state, sample.num_tokens, sample.prompt) == (SampleState.PENDING, 0, None)
    assert sample.recorded == {"tool": [1]}
    assert (sample.resets, sample.reset_tokens) == (1, 2)
    assert (state.totals.resets, state.totals.reset_tokens) == (1, 2)


def test_dropped_samples_are_counted_by_reason_and_hold_nothing() -> None:
    state = state_of(*BEGUN, runs_of((0, 0, 0, [1])), Dropped(uids_of(0), "too old"))

    assert len(state.sample(0).tokens) == 0
    state.apply(Dropped(uids_of(1), "no signal"))
    assert state.drop_reasons == {"too old": 1, "no signal": 1}
    with pytest.raises(LedgerError, match="settled before"):
        state.apply(Started(uids_of(0)))


def test_the_samples_that_a_dead_manager_left_running_are_known() -> None:
    assert state_of(*BEGUN, Cut(uids_of(0), "sync")).running().tolist() == [1]


SCORED = life_of_a_group(0, "a", 0, 0)[:-1]


@pytest.mark.parametrize(
    ("before", "event", "complaint"),
    [
        ([], Version(0, 1), "versions only grow"),
        ([], admitted(3, "b"), "as uid 3, expected 0"),
        (BEGUN[1:], admitted(2, "a"), "admitted twice"),
        (BEGUN[1:], admitted(2, "b", place=0), "index 0 in the data after index 0"),
        ([], Started(uids_of(0)), "uid 0 was never admitted"),
        ([admitted(0, "a")], Started(uids_of(0, 0)), "occurs twice"),
        ([admitted(0, "a")], Cut(uids_of(0), "sync"), "e0/a/0 is pending, not running"),
        ([admitted(0, "a")], runs_of((0, 0, 0, [1])), "is pending, not running"),
        (BEGUN[1:], runs_of((0, 1, 0, [1])), "1 tokens are missing before it"),
        ([*BEGUN[1:], runs_of((0, 0, 0, [1]))], runs_of((0, 0, 0, [1])), "are there already"),
        (BEGUN[1:], runs_of((0, 0, 0, [1]), (0, 2, 0, [1])), "completion of 1: 1 tokens"),
        (BEGUN[1:], runs_of((0, 0, 4, [1])), "unknown version 4"),
        (
            [*BEGUN[1:], runs_of((0, 0, 0, [1]))],
            PromptGiven(0, np.zeros(1, np.int32)),
            "the prompt was replaced after 1 tokens",
        ),
        ([*BEGUN[1:], Recorded(0, "k", 1)], Recorded(0, "k", 1), "'k' is recorded twice"),
        (BEGUN[1:], Scored(uids_of(0), np.zeros(1)), "is running, not finished"),
        (BEGUN[1:], RewardParts(uids_of(0), ["a"], np.zeros(1)), "is running, not finished"),
        (BEGUN[1:], TeacherLogprobs(0, np.zeros(3, np.float32)), "is running, not finished"),
        (SCORED, Finished(uids_of(0), ["x"]), "is scored, not"),
        (SCORED, Leased(0, uids_of(0)), "1 samples were leased from groups that have 2"),
        ([*SCORED, Version(1, 1)], Leased(0, uids_of(0, 1)), "1 steps are done"),
        ([*SCORED, Leased(0, uids_of(0, 1))], Leased(1, uids_of(0, 1)), "is leased, not scored"),
        ([*SCORED, Leased(0, uids_of(0, 1))], Dropped(uids_of(0), "x"), "is leased, not"),
        ([Version(1, 1), Checkpoint(1, 1)], Checkpoint(0, 0), "follows one after 1"),
        (
            [Version(1, 2)],
            Checkpoint(1, 1),
            "after 1 steps has version 1, which was announced",
        ),
    ],
)
def test_the_impossible_is_refused_and_changes_nothing(
    before: list[Event], event: Event, complaint: str
) -> None:
    state = state_of(Version(0, 0), *before)
    counts, totals = dict(state.counts), repr(state.totals)

    with pytest.raises(LedgerError, match=complaint):
        state.apply(event)

    assert +state.counts == {key: count for key, count in counts.items() if count}
    assert repr(state.totals) == totals
    state.check_integrity()


class Ledgers(RuleBasedStateMachine):
    """Random histories; the model is a dictionary per sample, its tokens a list of triples."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.restores: list[int] = []
        self.state = LedgerState()
        self.model: dict[int, dict[str, Any]] = {}
        self.version = self.current = -1
        self.versions: dict[int, int] = {}
        self.steps = 0
        self.num_made = 0  # no token occurs twice in `stream`
        self.checkpoints = {0: 0}
        self.announce(0)

    def do(self, event: Event) -> None:
        """Through the wire, as from a file."""
        (batch,) = decode_batches(wire(event))
        self.events.extend(batch.events)
        self.state.apply(batch.events[0])

    def announce(self, step: int) -> None:
        self.version += 1
        self.current = self.version
        self.versions[self.version] = step
        self.do(Version(self.version, step))

    def some(self, data: st.DataObject, *states: str) -> list[int]:
        able = [uid for uid, sample in self.model.items() if sample["state"] in states]
        if not able:
            return []
        return data.draw(st.lists(st.sampled_from(able), unique=True, min_size=1, max_size=4))

    def whole_groups(self, state: str) -> list[list[int]]:
        found: list[list[int]] = []
        for first in sorted({sample["first"] for sample in self.model.values()}):
            kin = [u for u, s in self.model.items() if s["first"] == first]
            kept = [uid for uid in kin if self.model[uid]["state"] != "dropped"]
            if kept and all(self.model[uid]["state"] == state for uid in kept):
                found.append(kept)
        return found

    @rule(num_samples=st.integers(1, 3))
    def admit(self, num_samples: int) -> None:
        first = len(self.model)
        self.do(admitted(first, f"p{first}", num_samples))
        for uid in range(first, first + num_samples):
            self.model[uid] = {"state": "pending", "first": first, "tokens": [], "cuts": 0}
            self.model[uid].update(reward=None, step=None, rolled_back=0, once={}, prompt=None)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        uids = self.some(data, "pending", "partial")
        self.do(Started(uids_of(*uids)))
        for uid in uids:
            self.model[uid]["state"] = "running"

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        uids = self.some(data, "running")
        self.do(Cut(uids_of(*uids), "sync"))
        for uid in uids:
            self.model[uid]["state"] = "partial"
            self.model[uid]["cuts"] += 1

    @rule(data=st.data(), length=st.integers(1, 40))
    def stream(self, data: st.DataObject, length: int) -> None:
        runs: list[tuple[int, int, int, list[int]]] = []
        for uid in [*self.some(data, "running"), *self.some(data, "running")]:
            version = data.draw(st.sampled_from([-1, *self.versions]))
            tokens = list(range(self.num_made, self.num_made + length))
            self.num_made += length
            runs.append((uid, len(self.model[uid]["tokens"]), version, tokens))
            self.model[uid]["tokens"] += [(token, -token, version) for token in tokens]
        self.do(runs_of(*runs))

    @rule(data=st.data(), prompt=st.lists(st.integers(0, 9), max_size=3))
    def replace_prompt(self, data: st.DataObject, prompt: list[int]) -> None:
        for uid in self.some(data, "pending", "running", "partial"):
            if not self.model[uid]["tokens"]:
                self.model[uid]["prompt"] = prompt
                self.do(PromptGiven(uid, np.asarray(prompt, np.int32)))

    @rule(data=st.data(), key=st.sampled_from("ab"))
    def record(self, data: st.DataObject, key: str) -> None:
        for uid in self.some(data, "pending", "running", "partial"):
            if key not in self.model[uid]["once"]:
                self.model[uid]["once"][key] = uid
                self.do(Recorded(uid, key, uid))

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        for uid in self.some(data, "pending", "running", "partial"):
            self.model[uid].update(state="pending", tokens=[], prompt=None)
            self.do(Reset(uid, "died"))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        uids = self.some(data, "pending", "running", "partial")
        self.do(Finished(uids_of(*uids), ["stop"] * len(uids)))
        for uid in uids:
            self.model[uid]["state"] = "finished"

    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        uids = self.some(data, "finished")
        self.do(Scored(uids_of(*uids), np.asarray(uids, np.float64)))
        for uid in uids:
            self.model[uid].update(state="scored", reward=float(uid))

    @precondition(lambda self: self.whole_groups("pending"))
    @rule(data=st.data())
    def hurry(self, data: st.DataObject) -> None:
        """A whole group from pending to scored, so that leases are not rare."""
        uids = data.draw(st.sampled_from(self.whole_groups("pending")))
        self.do(Started(uids_of(*uids)))
        for uid in uids:
            start = len(self.model[uid]["tokens"])
            for version in data.draw(st.lists(st.sampled_from([-1, *self.versions]), max_size=3)):
                self.do(runs_of((uid, start, version, [uid, start])))
                self.model[uid]["tokens"] += [(uid, -uid, version), (start, -start, version)]
                start += 2
            self.model[uid].update(state="scored", reward=0.5)
        self.do(Finished(uids_of(*uids), ["stop"] * len(uids)))
        self.do(Scored(uids_of(*uids), np.full(len(uids), 0.5)))

    @precondition(lambda self: self.whole_groups("scored"))
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def lease(self, data: st.DataObject, ahead: int) -> None:
        uids = data.draw(st.sampled_from(self.whole_groups("scored")))
        self.do(Leased(self.steps + ahead, uids_of(*uids)))
        for uid in uids:
            self.model[uid].update(state="leased", step=self.steps + ahead)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        uids = self.some(data, "pending", "running", "partial", "finished", "scored")
        self.do(Dropped(uids_of(*uids), "old"))
        for uid in uids:
            self.model[uid]["state"] = "dropped"

    @rule()
    def do_a_step(self) -> None:
        self.steps += 1
        self.announce(self.steps)

    @rule()
    def save(self) -> None:
        self.checkpoints[self.steps] = self.current
        self.do(Checkpoint(self.steps, self.current))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.checkpoints)))
        version = self.checkpoints[step]
        self.restores.append(step)
        # a new incarnation reads the ledger, and knows the step that it resumes from
        self.state = LedgerState()
        self.state.foresee(self.restores)
        for event in self.events:
            self.state.apply(event)
        self.do(Restored(step, version))
        self.steps, self.current = step, version
        self.checkpoints = {at: v for at, v in self.checkpoints.items() if at <= step}
        newer = {v for v, at in self.versions.items() if at > step}
        for sample in self.model.values():
            if sample["state"] == "leased" and sample["step"] >= step:
                sample.update(state="scored", step=None)
            if sample["state"] in ("leased", "dropped"):
                continue
            kept: list[Any] = []
            for triple in sample["tokens"]:
                if triple[2] in newer:
                    break
                kept.append(triple)
            if len(kept) < len(sample["tokens"]):
                sample["rolled_back"] += len(sample["tokens"]) - len(kept)
                sample.update(state="partial" if kept else "pending", tokens=kept, reward=None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.state.check_integrity()
        covered = max(self.checkpoints)
        expected: dict[str, int] = {}
        for uid, sample in self.model.items():
            state = sample["state"]
            if state == "leased" and sample["step"] < self.steps:
                state = "trained"
            expected[state] = expected.get(state, 0) + 1
            if state == "dropped" or (state == "trained" and sample["step"] < covered):
                continue
            found = account_of(self.state.sample(uid))
            triples = zip(found["tokens"], found["logprobs"], found["versions"], strict=True)
            assert list(triples) == sample["tokens"]
            assert found["state"] == state
            assert found["step"] == sample["step"]
            assert found["recorded"] == sample["once"]
            assert found["interruptions"] == sample["cuts"]
            assert found["rolled_back"] == sample["rolled_back"]
            assert found["reward"] == sample["reward"]
            assert all(run.stop > run.start for run in self.state.sample(uid).runs())
        assert {str(state): count for state, count in (+self.state.counts).items()} == expected
        num_cuts = sum(sample["cuts"] for sample in self.model.values())
        assert self.state.totals.interruptions == num_cuts
        assert self.state.num_groups == len({sample["first"] for sample in self.model.values()})

    def teardown(self) -> None:
        again = LedgerState()
        again.foresee(self.restores)
        again.apply_all(entries_of(self.events))
        assert wire_of(again) == wire_of(self.state)
        for cut in range(0, len(self.events), 1 + len(self.events) // 7):
            self.a_snapshot_continues_as_the_whole(cut)

    def a_snapshot_continues_as_the_whole(self, cut: int) -> None:
        before, after = self.events[:cut], self.events[cut:]
        early, later = (
            [e.step for e in part if isinstance(e, Restored)] for part in (before, after)
        )
        state = LedgerState()
        state.foresee([*early, *later])
        state.apply_all(entries_of(before))
        items = iter([msgpack.unpackb(item, strict_map_key=False) for item in wire_of(state)])
        snapshot = LedgerState.from_wire(items)
        assert wire_of(snapshot) == wire_of(state)
        snapshot.foresee(later)
        if state.steps_done > min(later, default=state.steps_done):
            with pytest.raises(LedgerError, match=r"were released|settled before"):
                snapshot.apply_all(entries_of(after))
            return
        snapshot.apply_all(entries_of(after))
        snapshot.check_integrity()
        assert wire_of(snapshot) == wire_of(self.state)
        assert snapshot.next_order_idx == self.state.next_order_idx


Ledgers.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestLedgers = Ledgers.TestCase
