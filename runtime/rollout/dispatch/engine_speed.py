from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 10.0
"""Busy seconds after which a measurement counts for 1 / e. Longer notices a throttled engine late;
shorter follows single prefills."""
_MIN_BUSY_S: Final = 0.5
"""Fewer busy seconds than this, a few batches of deltas, give no measurement."""


class EngineSpeed:
    """The speed of one engine, averaged exponentially over the time in which it had work. Pure.

    The engine made T tokens in D busy seconds, with R request-seconds in flight, all decayed alike.
    T / D, tokens per second, alone would be unfair: where a step costs the same for any number of
    requests, an engine that was given few makes few tokens, seems slow, and is given even less. T /
    R, tokens per second of one request, errs the other way where requests share the engine's
    arithmetic. The speed lies between the two, nearer to the first:

        T / (D^(3/4) R^(1/4))

    Two equal engines that hold n and k n requests then seem to differ by k^(1/4) to k^(3/4). The
    one with less work therefore still counts as less loaded, and is given more.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._request_s = 0.0
        self._since: float | None = None

    @property
    def value(self) -> float:
        """Comparable with other engines' values only; 0 while too little has been measured."""
        if self._busy_s < _MIN_BUSY_S:
            return 0.0
        return self._tokens / (math.pow(self._busy_s, 0.75) * math.pow(self._request_s, 0.25))

    def observe(self, num_tokens: int, num_requests: int, now: float) -> None:
        """Counts a batch of deltas from an engine that held `num_requests` since the last one. The
        first batch after a pause only starts the clock."""
        if num_requests <= 0:
            self._since = None
            return
        if self._since is not None:
            passed_s = max(0.0, now - self._since)
            kept = math.exp(-passed_s / _MEMORY_S)
            self._tokens = self._tokens * kept + num_tokens
            self._busy_s = self._busy_s * kept + passed_s
            self._request_s = self._request_s * kept + passed_s * num_requests
        self._since = now

    def pause(self) -> None:
        """Excludes the time until the next batch: the engine has no work, or may not do it."""
        self._since = None
