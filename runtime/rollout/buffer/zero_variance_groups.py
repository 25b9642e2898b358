from __future__ import annotations

from collections.abc import Callable
from typing import Final

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.dispatch.group import Group

_MIN_STREAK: Final = 1000
"""Groups in a row without a useful one before a run may end. Far fewer could end a run on hard data
by chance; far more let a hopeless run continue."""

_STREAK_IN_BATCHES: Final = 10
"""The same in batches. Far fewer would miss groups that take longer than others; far more make a
run with large batches wait in vain."""

_MIN_REPORTED: Final = 100
_REPORTED_IN_BATCHES: Final = 4
"""Batches before the first message. Fewer are not worth one; more leave slow runs unexplained."""


class ZeroVarianceGroups:
    """Counts dropped groups whose rewards are all equal; ends a run that gets no others. Pure. It
    counts during one incarnation of a manager. A streak shorter than `num_prompts` has not tried
    each prompt. Each line for the operator needs twice as many dropped groups as the one before it.
    """

    def __init__(
        self, num_prompts: int, groups_per_batch: int, note: Callable[[str], None]
    ) -> None:
        self._num_prompts = num_prompts
        self._groups_per_batch = groups_per_batch
        self._note = note
        self._limit = max(num_prompts, _MIN_STREAK, _STREAK_IN_BATCHES * groups_per_batch)
        self._next_note = max(_MIN_REPORTED, _REPORTED_IN_BATCHES * groups_per_batch)
        self._streak = 0  # groups dropped since one was kept
        self._num_for_batch = 0
        self._lowest = self._highest = 0.0  # rewards of the streak

    def end_streak(self) -> None:
        """A useful group was scored, or earlier groups are generated again."""
        self._streak = 0

    def batch_taken(self) -> None:
        self._num_for_batch = 0

    def dropped(self, group: Group, num_ready: int) -> None:
        """Counts a dropped group. Raises RolloutError if no later group is likely to be useful."""
        reward = float(group.rewards[0])
        is_first = self._streak == 0
        self._lowest = reward if is_first else min(self._lowest, reward)
        self._highest = reward if is_first else max(self._highest, reward)
        self._streak += 1
        self._num_for_batch += 1
        if self._streak >= self._limit:
            raise RolloutError(
                f"{self._streak} groups in a row were dropped, out of {self._num_prompts} "
                f"prompts: the completions of each all had one reward ({self._range()}), and with "
                "rollout.drop_zero_variance_groups nothing is trained on then. Check that the "
                "reward function distinguishes good completions from bad ones and that "
                "rollout.temperature lets them differ, use prompts that are neither too hard nor "
                "too easy, or set rollout.drop_zero_variance_groups = false"
            )
        if self._num_for_batch >= self._next_note:
            self._next_note = 2 * self._num_for_batch
            self._note(
                f"{self._num_for_batch} groups were dropped since the last batch, which needs "
                f"{self._groups_per_batch} and has {num_ready}: the completions of each all had "
                f"one reward ({self._range()} lately), and rollout.drop_zero_variance_groups is "
                f"set; the run ends after {self._limit} in a row"
            )

    def _range(self) -> str:
        if self._lowest == self._highest:
            return f"{self._lowest:g} in all of them"
        return f"from {self._lowest:g} to {self._highest:g}"
