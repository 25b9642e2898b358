from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from umbra.runtime.errors import RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.group import Group

_WINDOW: Final = 200
"""Recent groups over which `max_failed_share` is counted."""
_MAX_REPORTED: Final = 5
_REPORT_WINDOW_S: Final = 60.0
"""Window of `_MAX_REPORTED`. More reports flood the console; fewer hide single prompts."""
_MAX_CAUSE_LEN: Final = 1000
"""An exception's text may be a whole page of HTML."""
_SHOWN_PROMPT_LEN: Final = 60


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
        """Counts a dropped group; raises like `error` if more failed than is allowed."""
        self._have_failed.append(True)
        window = min(_WINDOW, num_admitted)
        num_failed, allowed = sum(self._have_failed), int(self._max_failed_share * window)
        counts = f"{num_failed} of the last {window} groups failed"
        if num_failed > allowed:
            message = (
                f"{error}; {counts}; rollout.max_failed_share = {self._max_failed_share:g} allows "
                f"{allowed}"
            )
            is_reward = isinstance(error, RewardError)
            raise RewardError(message) if is_reward else RolloutError(message)
        self._report(group, error, f"{counts}, {allowed} may")

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
