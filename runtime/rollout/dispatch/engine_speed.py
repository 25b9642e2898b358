"""How fast an engine is, from what it delivers. Pure: the caller brings the time."""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 10.0
# Busy seconds after which a measurement counts for 1 / e. Longer notices a throttled engine
# late; shorter follows single prefills.
_MIN_BUSY_S: Final = 0.5
# Busy seconds without which there is no measurement: a few batches of deltas.


class EngineSpeed:
    """The speed of one engine, averaged exponentially over the time in which it had work.

    T tokens made in D busy seconds, with R request-seconds in flight, all decayed alike. Tokens a
    second, T / D, are what an engine does with what it holds. But where a step costs the same
    however many requests take part in it, an engine that was given few makes few tokens: it would
    seem slow, be given less, and stay so. Tokens a second of one request, T / R, err the other way
    where requests share the engine's arithmetic. The speed lies between, nearer to the first:

        T / (D^(3/4) R^(1/4))

    Engines of one kind that hold n and k n requests then seem to differ by k^(1/4) to k^(3/4),
    so the one with less to do stays the one with less to do, and is given more.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._request_s = 0.0
        self._since: float | None = None

    @property
    def value(self) -> float:
        """To be compared with other engines' only; 0 while too little has been seen."""
        if self._busy_s < _MIN_BUSY_S:
            return 0.0
        return self._tokens / (math.pow(self._busy_s, 0.75) * math.pow(self._request_s, 0.25))

    def observe(self, num_tokens: int, num_requests: int, now: float) -> None:
        """A batch of deltas came, from an engine that held so many requests since the last one.

        The first batch after a pause only starts the clock.
        """
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
        """The engine has nothing to do, or may not do it: the time does not count."""
        self._since = None
