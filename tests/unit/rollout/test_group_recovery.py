"""Groups that a manager restores from its ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ledger_samples import runs_of
from rollout_samples import make_trajectory

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Event,
    Finished,
    RewardParts,
    Scored,
    Started,
    TeacherLogprobs,
    Version,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.manager.group_recovery import Recovered, recover_groups

BOTH = uids_of(0, 1)


def recovered(*parts: Event, names: tuple[str, ...] = ("exact", "short")) -> Group:
    """The group of two scored samples, as a manager that compares `names` has it again."""
    return recover(*parts, names=names).ready[0]


def recover(*parts: Event, names: tuple[str, ...] = (), has_teacher: bool = False) -> Recovered:
    state = LedgerState()
    for event in (
        Version(0, 0),
        Admitted(0, "g", "p", 0, 0, np.zeros(2, np.int64)),
        Started(BOTH),
        runs_of((0, 0, 0, [5]), (1, 0, 0, [6])),
        Finished(BOTH, ["stop", "stop"]),
        *parts,
        Scored(BOTH, np.asarray([1.0, 1.0])),
    ):
        state.apply(event)
    samples = [make_trajectory(sample_id=f"g/{k}") for k in range(2)]
    return recover_groups(
        state, lambda idx: Group("g", samples, idx, names), has_teacher=has_teacher
    )


def test_a_group_waits_for_its_teacher_again_unless_the_ledger_has_all_answers() -> None:
    answers = [TeacherLogprobs(uid, np.asarray([-uid - 0.5], np.float32)) for uid in (0, 1)]

    whole, half = recover(*answers, has_teacher=True), recover(answers[0], has_teacher=True)

    assert [sample.teacher_logprobs for sample in whole.ready[0].trajectories] == [[-0.5], [-1.5]]
    assert [sample.teacher_logprobs for sample in half.open[0].trajectories] == [[-0.5], None]


def test_a_run_without_a_teacher_has_no_answers_of_an_earlier_one() -> None:
    """They would be a column of some of a batch's samples."""
    group = recover(TeacherLogprobs(0, np.asarray([-0.5], np.float32))).ready[0]

    assert [sample.teacher_logprobs for sample in group.trajectories] == [None, None]


def test_parts_of_rewards_are_compared_again_after_a_recovery() -> None:
    values = np.asarray([0.25, math.nan, 1.0, 0.5])  # sample after sample

    group = recovered(RewardParts(BOTH, ["short", "exact"], values))

    assert str(group.compared_rewards.tolist()) == "[[nan, 0.5], [0.25, 1.0]]"
    assert not group.has_zero_variance


def test_rewards_without_the_parts_to_compare_are_refused() -> None:
    of_one = RewardParts(BOTH, ["exact"], np.zeros(2))

    with pytest.raises(
        LedgerError, match=r"reward of g/0 without the part 'short', which train.ad"
    ):
        recovered(of_one)
    with pytest.raises(LedgerError, match="reward of g/0 without the part 'exact'"):
        recovered()
    assert recovered(names=()).compared_rewards.tolist() == [[1.0, 1.0]]
