"""Compares the ledger's accounts with a manager's state."""

from __future__ import annotations

from collections.abc import Mapping

from recorded_world import GIVEN_FROM, Life, Taken, logprob_at, token_at

from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import SampleAccount, SampleState

_HAS_REWARD = (SampleState.SCORED, SampleState.LEASED)


def check_accounts(state: LedgerState, life: Life) -> None:
    """Every group that is not trained or dropped is there, as it was recorded; no other is."""
    num_held = num_open = 0
    for group in state.groups():
        states = {sample.state for sample in group}
        if states <= {SampleState.TRAINED, SampleState.DROPPED}:
            continue
        num_held += 1
        live = life.groups[group[0].group.order_idx]
        for sample, held in zip(live.trajectories, group, strict=True):
            check_sample(sample, held)
            num_open += not sample.is_finished
    size, flow = life.config.settings.group_size, life.flow.progress()
    # Leased samples are trained once the next version is announced, which the flow learns later.
    num_done = state.counts[SampleState.TRAINED] // size - flow["groups_trained"]
    assert flow["groups_open"] + flow["groups_leased"] - num_done == num_held
    assert flow["trajectories_open"] == num_open
    assert flow["groups_dropped"] == state.counts[SampleState.DROPPED] // size


def check_sample(sample: Trajectory, held: SampleAccount) -> None:
    where = f"{sample.sample_id}, {held.state}"
    assert sample.uid == held.uid
    assert sample.tokens.tolist() == held.tokens.tolist(), where
    assert sample.versions.tolist() == held.versions.tolist(), where
    assert sample.logprobs.tolist() == held.logprobs.tolist(), where
    prompt = sample.prompt.tokens if held.prompt is None else held.prompt
    assert sample.prompt_tokens.tolist() == prompt.tolist(), where
    assert sample.num_generated == held.num_generated, where
    for at, (token, version) in enumerate(zip(sample.tokens, sample.versions, strict=True)):
        if version < 0:
            assert token > GIVEN_FROM, where
        else:
            assert token == token_at(sample.seed, at), where
            assert sample.logprobs[at] == logprob_at(at, int(version)), where
    is_over = held.state in (SampleState.FINISHED, *_HAS_REWARD)
    assert sample.is_finished == is_over, where
    assert sample.is_recorded_running == (held.state is SampleState.RUNNING), where
    if is_over:
        assert sample.finish_reason == held.finish_reason, where
    if held.state in _HAS_REWARD:
        assert sample.reward == held.reward is not None, where
        assert repr(dict(sample.reward_parts)) == repr(held.reward_parts), where


def check_batches(state: LedgerState, delivered: Mapping[int, Mapping[str, Taken]]) -> None:
    """Asserts that the batches of the ranks, by step, are what was trained on, to the token."""
    for group in state.groups():
        for held in group:
            if held.state is SampleState.TRAINED:
                assert held.step is not None
                taken = delivered[held.step][held.sample_id]
                assert taken.versions == held.versions.tolist()
                assert (taken.tokens, taken.reward) == (held.tokens.tolist(), held.reward)
                assert taken.parts == repr(held.reward_parts)
    done = [batch for step, batch in delivered.items() if step < state.steps_done]
    assert sum(map(len, done)) == state.counts[SampleState.TRAINED]
