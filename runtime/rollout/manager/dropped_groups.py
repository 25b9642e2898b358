"""Counts groups that failed or that teach nothing; too many of them end the run. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from umbra.runtime.errors import RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.trajectory import Group

_WINDOW: Final = 200
"""Recent groups over which `max_failed_share` is counted."""
_UNLIKELY: Final = 0.001
"""A run whose groups have all failed ends early if the allowed share makes that less probable. A
larger value may end a run by chance; a smaller one makes a broken function cost more groups."""
_MAX_REPORTED: Final = 5
_REPORT_WINDOW_S: Final = 60.0
"""Window of `_MAX_REPORTED`. More reports flood the console; fewer hide single prompts."""
_MAX_CAUSE_LEN: Final = 1000
"""An exception's text may be a whole page of HTML."""
_SHOWN_PROMPT_LEN: Final = 60

_MIN_STREAK: Final = 1000
"""Groups in a row without a useful one before a run may end. Far fewer could end a run on hard data
by chance; far more let a hopeless run continue."""

_STREAK_IN_BATCHES: Final = 10
"""The same in batches. Far fewer would miss groups that take longer than others; far more make a
run with large batches wait in vain."""

_MIN_REPORTED: Final = 100
_REPORTED_IN_BATCHES: Final = 4
"""Batches before the first message. Fewer are not worth one; more leave slow runs unexplained."""


class FailedGroups:
    """Counts and reports groups that user code failed for; ends a run that has too many. Pure. It
    counts during one incarnation of a manager. `note` gets a line for the operator about each
    group, unless there are many at once."""

    def __init__(
        self,
        max_failed_share: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failed_share = max_failed_share
        self._note = note
        self._clock = clock
        self._have_failed: deque[bool] = deque(maxlen=_WINDOW)  # of the groups that ended last
        self._reported_at: deque[float] = deque(maxlen=_MAX_REPORTED)
        self._num_unreported = 0

    def scored(self) -> None:
        self._have_failed.append(False)

    def failed(self, group: Group, error: UmbraError, num_admitted: int) -> None:
        """Counts a dropped group; raises like `error` if more failed than is allowed, or all so far
        and more than that share of the `num_admitted`: groups that fail end before others."""
        self._have_failed.append(True)
        share, num_failed = self._max_failed_share, sum(self._have_failed)
        allowed = round(share * _WINDOW)
        are_all = all(self._have_failed) and share**num_failed < _UNLIKELY
        counts = f"{num_failed} of the last {len(self._have_failed)} groups failed"
        may = f"{allowed} of {_WINDOW} may"
        if num_failed > allowed or (are_all and num_failed > share * min(_WINDOW, num_admitted)):
            limit = f"rollout.max_failed_share = {share:g}"
            message = f"{error}; {counts}; by {limit}, {may}{', but not all' * are_all}"
            is_reward = isinstance(error, RewardError)
            raise RewardError(message) if is_reward else RolloutError(message)
        self._report(group, error, f"{counts}, {may}")

    def _report(self, group: Group, error: UmbraError, counts: str) -> None:
        now = self._clock()
        is_full = len(self._reported_at) == _MAX_REPORTED
        if is_full and now - self._reported_at[0] < _REPORT_WINDOW_S:
            self._num_unreported += 1
            return
        self._reported_at.append(now)
        unreported = (
            f"; for the {self._num_unreported} before it see umbra ledger RUN_DIR --state dropped"
            if self._num_unreported
            else ""
        )
        self._num_unreported = 0
        self._note(
            f"group {group.group_id} (prompt {_shown(group.trajectories[0].prompt.text)}) is "
            f"dropped: {str(error)[:_MAX_CAUSE_LEN]} ({counts}{unreported})"
        )


def _shown(prompt: str) -> str:
    """Begin and end of a long prompt: either may be the same in all prompts."""
    half = _SHOWN_PROMPT_LEN // 2
    is_long = len(prompt) > _SHOWN_PROMPT_LEN
    return repr(f"{prompt[:half]}…{prompt[-half:]}" if is_long else prompt)


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
