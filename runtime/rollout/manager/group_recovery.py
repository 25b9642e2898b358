from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import SampleAccount, SampleState


@dataclass(slots=True)
class Recovered:
    """The state that a manager resumes with; groups by index in the prompt order, ascending. Groups
    in `open` are not scored, those in `ready` not leased; `leases` are by optimizer step.
    `next_idx` is None if nothing was ever admitted; the counts cover the whole history. `records`
    are the values that loops of unfinished samples recorded."""

    open: dict[int, Group] = field(default_factory=dict[int, Group])
    ready: dict[int, Group] = field(default_factory=dict[int, Group])
    leases: dict[int, list[Group]] = field(default_factory=dict[int, list[Group]])
    next_idx: int | None = None
    num_admitted: int = 0
    num_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    records: dict[Trajectory, Mapping[str, Any]] = field(
        default_factory=dict[Trajectory, Mapping[str, Any]]
    )

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens in groups that are not leased yet."""
        held = [*self.open.values(), *self.ready.values()]
        return sum(sample.num_generated for group in held for sample in group.trajectories)


def recover_groups(
    state: LedgerState, make_group: Callable[[int], Group], *, has_teacher: bool = False
) -> Recovered:
    """Restores groups from the ledger's accounts at the end of the history. `make_group` returns a
    fresh group for an index of the prompt order; with `has_teacher`, groups that the teacher has
    not scored are open, and without it, answers of an earlier teacher are left out. Raises
    LedgerError if the data set, or a setting that decides its order, has changed."""
    group_size = max(1, state.next_uid // max(1, state.num_groups))
    recovered = Recovered(
        next_idx=state.next_order_idx if state.num_groups else None,
        num_admitted=state.num_groups,
        num_trained=state.counts[SampleState.TRAINED] // group_size,
        dropped=Counter(
            {reason: count // group_size for reason, count in state.drop_reasons.items()}
        ),
    )
    for accounts in state.groups():
        states = {account.state for account in accounts}
        if states <= {SampleState.TRAINED, SampleState.DROPPED}:
            continue
        order_idx = accounts[0].group.order_idx
        group = make_group(order_idx)
        _check(group, accounts)
        for sample, held in zip(group.trajectories, accounts, strict=True):
            _fill(sample, held)
            _check_parts(sample, group)
            if has_teacher:
                sample.teacher_logprobs = held.teacher_logprobs
            if not sample.is_finished:
                recovered.records[sample] = held.recorded
        if SampleState.LEASED in states:
            step = accounts[0].step
            assert step is not None
            recovered.leases.setdefault(step, []).append(group)
        elif states == {SampleState.SCORED} and not (has_teacher and _lacks_teacher(group)):
            recovered.ready[order_idx] = group
        else:
            recovered.open[order_idx] = group
    return recovered


def _lacks_teacher(group: Group) -> bool:
    return any(sample.teacher_logprobs is None for sample in group.trajectories)


def _check(group: Group, accounts: Sequence[SampleAccount]) -> None:
    seeds, held = [sample.seed for sample in group.trajectories], accounts[0].group
    if group.group_id != held.group_id or seeds != [account.seed for account in accounts]:
        raise LedgerError(
            f"index {held.order_idx} in the data is {group.group_id} with {len(seeds)} "
            f"samples, but the ledger has {held.group_id} with {len(accounts)} there: the "
            "data set, train.seed, data.shuffle or rollout.group_size was changed; change it back, "
            "or begin a new run in another run.dir"
        )


def _check_parts(sample: Trajectory, group: Group) -> None:
    missing = sorted(set(group.parts) - sample.reward_parts.keys())
    if sample.reward is not None and missing:
        raise LedgerError(
            f"the ledger has the reward of {sample.sample_id} without the part {missing[0]!r}, "
            "which train.advantage = 'gdpo' compares: train.advantage, reward.functions or "
            "reward.overlong_buffer was changed; change it back, or begin a new run in another "
            "run.dir"
        )


def _fill(sample: Trajectory, held: SampleAccount) -> None:
    sample.uid = held.uid
    sample.num_interruptions = held.interruptions
    if held.prompt is not None:
        sample.extend_context(held.prompt)
    # The budget may have been lowered since: the tokens stay, and the completion ends there.
    sample.budget = max(sample.budget, held.num_generated)
    sample.max_context_len = max(sample.max_context_len, len(sample) + held.num_tokens)
    sample.append_runs(held.runs(), held.tokens, held.logprobs)
    if held.state in (SampleState.FINISHED, SampleState.SCORED, SampleState.LEASED):
        sample.finish(held.finish_reason)
        sample.reward, sample.reward_parts = held.reward, held.reward_parts
