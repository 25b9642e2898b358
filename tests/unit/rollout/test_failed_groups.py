from __future__ import annotations

import numpy as np
import pytest

from umbra.runtime.errors import RewardError, RolloutError
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.manager.dropped_groups import FailedGroups
from umbra.runtime.rollout.prompts import Prompt


class World:
    """Failing groups, at a time that the test says."""

    def __init__(self, max_failed_share: float = 1.0) -> None:
        self.now = 1000.0
        self.notes: list[str] = []
        self._num_failed = 0
        self.groups = FailedGroups(max_failed_share, self.notes.append, lambda: self.now)

    def fail(self, error: RolloutError, text: str = "3,7=") -> None:
        prompt = Prompt("p", text, np.zeros(1, np.int32), {})
        sample = Trajectory("g/0", prompt, 0, budget=4, max_context_len=8)
        self._num_failed += 1
        self.groups.failed(Group(f"g{self._num_failed}", [sample]), error, num_admitted=400)


def test_a_failed_group_is_reported_with_its_prompt_and_its_reason() -> None:
    world = World(0.05)

    world.fail(RewardError("took longer than 120 s"))

    assert world.notes == [
        "group g1 (prompt '3,7=') is dropped: took longer than 120 s "
        "(1 of the last 200 groups failed, 10 may)"
    ]


def test_a_long_prompt_and_a_long_reason_are_cut() -> None:
    world = World()

    world.fail(RewardError("<html>" + 9000 * "x"), text="begin" + 9000 * "-" + "end")

    assert "'begin--" in world.notes[0]
    assert "--end'" in world.notes[0]
    assert len(world.notes[0]) < 1300


def test_many_groups_at_once_are_counted_and_reported_with_a_later_one() -> None:
    world = World()
    for _ in range(8):
        world.fail(RewardError("no"))
        world.now += 1.0
    assert len(world.notes) == 5

    world.now += 55.0
    world.fail(RewardError("no"))

    assert world.notes[5:] == [
        "group g9 (prompt '3,7=') is dropped: no (9 of the last 200 groups failed, 200 may; for "
        "the 3 before it see umbra ledger RUN_DIR --state dropped)"
    ]


@pytest.mark.parametrize("kind", [RewardError, RolloutError])
def test_more_than_allowed_end_the_run_with_the_last_reason(kind: type[RolloutError]) -> None:
    world = World(0.01)
    world.fail(kind("no"))
    for _ in range(199):
        world.groups.scored()

    world.fail(kind("no"))  # the first is no longer among the last 200
    world.fail(kind("no"))
    with pytest.raises(kind, match=r"^not again; 3 of the last 200 groups failed; .*= 0.01 allow"):
        world.fail(kind("not again"))

    assert len(world.notes) == 3
