"""Groups that teach nothing: how many were dropped, and when no more can be hoped for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.dispatch.group import Group

_MIN_ROW: Final = 1000
"""Groups without one of use before the run may end. Far fewer would end one on hard data, of which
a hundredth is of use, by chance; with far more a run that can never go on takes long to say so."""

_ROW_IN_BATCHES: Final = 10
"""The same in batches. With far fewer, groups that take longer than others have not had their turn;
with far more a large batch is waited for that never comes."""

_MIN_NOTED: Final = 100
_NOTED_IN_BATCHES: Final = 4
"""Groups, at least and in batches, before the first note. Far fewer are nothing to tell of; far
more leave a slow run without a word."""


class ZeroVarianceGroups:
    """Counts dropped groups, of which all rewards are equal, for one life of a manager.

    Args:
        num_prompts: of the data; a row shorter than that has not tried each.
        wanted: groups of a batch.
        note: takes a line for the person who runs the job. Each note needs twice as many groups
            for one batch as the one before it.
    """

    def __init__(self, num_prompts: int, wanted: int, note: Callable[[str], None]) -> None:
        self._num_prompts = num_prompts
        self._wanted = wanted
        self._note = note
        self._limit = max(num_prompts, _MIN_ROW, _ROW_IN_BATCHES * wanted)
        self._next_note = max(_MIN_NOTED, _NOTED_IN_BATCHES * wanted)
        self._num_in_row = 0  # since a group was kept
        self._num_for_batch = 0
        self._lowest = self._highest = 0.0  # rewards of the row

    def end_row(self) -> None:
        """A group of use was scored, or what was generated before is generated again."""
        self._num_in_row = 0

    def batch_taken(self) -> None:
        """Groups are for the next batch from here on."""
        self._num_for_batch = 0

    def dropped(self, group: Group, num_ready: int) -> None:
        """Counts a group.

        Args:
            num_ready: groups that wait for the others of their batch.

        Raises:
            RolloutError: nothing speaks for any later group to be of use.
        """
        reward = float(group.rewards[0])
        is_first = self._num_in_row == 0
        self._lowest = reward if is_first else min(self._lowest, reward)
        self._highest = reward if is_first else max(self._highest, reward)
        self._num_in_row += 1
        self._num_for_batch += 1
        if self._num_in_row >= self._limit:
            raise RolloutError(
                f"{self._num_in_row} groups in a row were dropped, out of {self._num_prompts} "
                f"prompts: the completions of each all had one reward ({self._range()}), and with "
                "rollout.drop_zero_variance_groups nothing is trained on then. See that the reward "
                "function tells good completions from bad ones and that rollout.temperature lets "
                "them differ, take prompts that are neither too hard nor too easy, or set "
                "rollout.drop_zero_variance_groups = false"
            )
        if self._num_for_batch >= self._next_note:
            self._next_note = 2 * self._num_for_batch
            self._note(
                f"{self._num_for_batch} groups were dropped since the last batch, which wants "
                f"{self._wanted} and has {num_ready}: the completions of each all had one reward "
                f"({self._range()} lately), and rollout.drop_zero_variance_groups is set; after "
                f"{self._limit} in a row the run ends"
            )

    def _range(self) -> str:
        if self._lowest == self._highest:
            return f"{self._lowest:g} in all of them"
        return f"from {self._lowest:g} to {self._highest:g}"
