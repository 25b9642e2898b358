from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from umbra.runtime.errors import ConfigError
from umbra.runtime.process.process_end import ExitStatus

RestartMode = Literal["never", "on_failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Whether ("on_failure") and when a process is started again: at most `max_restarts` times
    within `window_s` seconds. The first restart waits for `backoff_initial_s`, each later one
    within the window twice as long, at most `backoff_max_s`."""

    mode: RestartMode = "on_failure"
    max_restarts: int = 5
    """More: a process that cannot start is tried for longer before the job fails. Fewer: a job of
    days ends after a handful of crashes within one window."""
    window_s: float = 600.0
    """Longer: rare crashes add up. Shorter than max_restarts backoffs: crash loops go unnoticed."""
    backoff_initial_s: float = 0.1
    """Longer: each recovery waits. Zero: a process that dies at import restarts without pause."""
    backoff_max_s: float = 10.0

    def __post_init__(self) -> None:
        if self.mode not in ("never", "on_failure"):
            raise ConfigError(f"restart mode {self.mode!r}: use never or on_failure")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts}: use 0 or more")
        if self.window_s <= 0:
            raise ConfigError(f"restart window_s is {self.window_s:g}: use more than 0")
        if not 0 <= self.backoff_initial_s <= self.backoff_max_s:
            raise ConfigError(
                f"restart backoff of {self.backoff_initial_s:g} s to {self.backoff_max_s:g} s: "
                "use 0 <= backoff_initial_s <= backoff_max_s"
            )


@dataclass(frozen=True, slots=True)
class ScheduleRestart:
    delay_s: float


@dataclass(frozen=True, slots=True)
class DeclareFailed:
    reason: str


class RestartTracker:
    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.num_restarts = 0
        """Over the whole lifetime, for statistics."""
        self._restarts_at: deque[float] = deque()  # Ascending, within the window.

    def observe(self, status: ExitStatus, now: float) -> ScheduleRestart | DeclareFailed:
        """Decides after an end at monotonic time `now` that umbra did not request."""
        policy = self.policy
        if policy.mode == "never":
            return DeclareFailed(str(status))
        while self._restarts_at and now - self._restarts_at[0] >= policy.window_s:
            self._restarts_at.popleft()
        num_recent = len(self._restarts_at)
        if num_recent >= policy.max_restarts:
            return DeclareFailed(
                f"{status}, after {num_recent} restarts within {policy.window_s:g} s "
                f"(allowed: {policy.max_restarts})"
            )
        self._restarts_at.append(now)
        self.num_restarts += 1
        # Exponents are bounded: 2.0**1024 overflows, and any backoff is at its maximum long before.
        return ScheduleRestart(
            min(policy.backoff_initial_s * 2.0 ** min(num_recent, 60), policy.backoff_max_s)
        )
