from __future__ import annotations

import bisect
import math
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.float64]

# An engine that has the request's prefix is preferred while its load exceeds the idlest one's by at
# most this many requests of the same cost, about one group. Higher piles long groups onto one
# engine; lower scatters them, and each engine prefills the prompt again.
_AFFINITY_REQUESTS: Final = 16
# A request that must wait for a slot counts as this share of a full batch more. With a higher one,
# faster engines idle while slower ones have full batches; with a lower one, requests wait for whole
# generations where completions end together.
_WAIT_SHARE: Final = 0.25
# No engine counts as more than this many times slower than the fastest, so that a slow one still
# gets requests and can be measured again. Higher strands an engine that once stalled.
_MAX_SPEED_RATIO: Final = 8.0
# Interval of comparing speeds. Longer follows changes late; shorter computes them for every batch
# of every engine, while averages over ten seconds have not moved.
_COMPARED_FOR_S: Final = 0.5

_MEMORY_S: Final = 10.0
"""Busy seconds after which a measurement counts for 1 / e. Longer notices a throttled engine late;
shorter follows single prefills."""
_MIN_BUSY_S: Final = 0.5
"""Fewer busy seconds than this, a few batches of deltas, give no measurement."""


class EngineId(NamedTuple):
    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class Router:
    """Chooses the serving engine with the least work, and prefers those that have the prefix. Pure.

    Outstanding tokens are the tokens that an engine may still have to process: prompt plus budget
    of its requests, less its output so far. Divided by its speed they are its outstanding work, in
    seconds but for a factor that all engines share. An engine that has not been measured counts as
    the mean of the others.

    An engine works on `max_running` requests at a time and holds up to `max_inflight`. While
    another one would begin a request at once, it waits only if that one is far slower, or if the
    engine has the trajectory's own tokens: to prefill a long context elsewhere may take longer.
    """

    def __init__(self, max_inflight: int, max_running: int) -> None:
        self._max_inflight = max_inflight
        self._max_running = max_running
        # Sorted, so that choices are reproducible. All columns have a row for each, [E].
        self._engines: list[EngineId] = []
        self._rows: dict[EngineId, int] = {}
        self._load = np.zeros(0, np.int64)
        self._inflight = np.zeros(0, np.int64)
        self._serving = np.zeros(0, np.bool_)
        self._measured_speeds = np.zeros(0)  # 0 without a measurement
        # By name: the next incarnation runs on the same hardware.
        self._measured: dict[str, EngineSpeed] = {}
        self._speeds: Column | None = None  # 1 for engines that do not serve; None: to be computed
        self._compare_at_s = 0.0

    def set_serving(self, engine: EngineId, serving: bool) -> None:
        """Allows or forbids new requests; requests that the engine holds stay counted."""
        if engine not in self._rows:
            self._add(engine)
        row = self._rows[engine]
        if self._serving[row] != serving:
            self._serving[row] = serving
            self._speeds = None
        if not serving:
            self._pause(engine)

    def remove(self, engine: EngineId) -> None:
        self._pause(engine)
        row = self._rows.get(engine)
        if row is not None:
            del self._engines[row]
            self._set_columns([np.delete(column, row) for column in self._columns()])

    @property
    def serving(self) -> list[EngineId]:
        return [self._engines[row] for row in np.flatnonzero(self._serving)]

    def outstanding_tokens(self, engine: EngineId) -> int:
        row = self._rows.get(engine)
        return 0 if row is None else int(self._load[row])

    def capacity_left(self, engine: EngineId) -> int:
        row = self._rows.get(engine)
        return 0 if row is None else self._max_inflight - int(self._inflight[row])

    def choose(
        self,
        cost: int,
        own: EngineId | None = None,
        groups: EngineId | None = None,
        failed: EngineId | None = None,
    ) -> EngineId | None:
        """An engine for `cost` tokens, or None while all are full. `own` may have the trajectory's
        tokens cached, and `groups` its prompt alone. `failed` is chosen if no other one serves."""
        free = self._serving & (self._inflight < self._max_inflight)
        if failed is not None and failed in self._rows and self._serving.sum() > 1:
            free[self._rows[failed]] = False
        if not free.any():
            return None
        waits = self._inflight >= self._max_running
        wait = np.where(waits, _WAIT_SHARE * self._max_running * cost, 0)
        load, speeds = self._load, self._relative_speeds()
        idlest = int(np.where(free, (load + wait + cost) / speeds, np.inf).argmin())
        limit = (load[idlest] + _AFFINITY_REQUESTS * cost) / speeds[idlest]
        begins = free if waits[idlest] else free & ~waits
        for engine, fits in ((own, free), (groups, begins)):
            row = None if engine is None else self._rows.get(engine)
            if row is not None and fits[row] and load[row] / speeds[row] <= limit:
                return engine
        return self._engines[idlest]

    def fair_share(self, engine: EngineId) -> float:
        """The share of all outstanding tokens that a serving engine has when loads are even."""
        return float(self._fair_shares()[self._rows[engine]])

    def overloaded(self) -> list[tuple[EngineId, float]]:
        """Serving engines with more tokens than their fair share, and how many more."""
        total = self._load[self._serving].sum()
        excess = np.where(self._serving, self._load - total * self._fair_shares(), 0.0)
        return [(self._engines[row], float(excess[row])) for row in np.flatnonzero(excess > 0)]

    def charge(self, engine: EngineId, cost: int) -> None:
        row = self._rows[engine]
        self._load[row] += cost
        self._inflight[row] += 1

    def progress(self, engine: EngineId, num_tokens: int) -> None:
        row = self._rows.get(engine)
        if row is not None:
            self._load[row] -= num_tokens

    def release(self, engine: EngineId, num_unused: int) -> None:
        """Counts the end of a request that left `num_unused` of its cost unused."""
        row = self._rows.get(engine)
        if row is not None:
            self._load[row] -= num_unused
            self._inflight[row] -= 1
            if self._inflight[row] == 0:
                self._pause(engine)

    def measure(self, engine: EngineId, num_tokens: int, now: float) -> None:
        """Updates the engine's speed with a batch of tokens; `now` in monotonic seconds. Must be
        called before the batch's tokens and finishes are counted."""
        row = self._rows.get(engine)
        if row is not None and self._serving[row]:
            speed = self._measured.setdefault(engine.name, EngineSpeed())
            speed.observe(num_tokens, int(self._inflight[row]), now)
            self._measured_speeds[row] = speed.value
            if now >= self._compare_at_s:
                self._speeds = None
                self._compare_at_s = now + _COMPARED_FOR_S

    def _add(self, engine: EngineId) -> None:
        row = bisect.bisect(self._engines, engine)
        self._engines.insert(row, engine)
        speed = self._measured.get(engine.name)
        values = (0, 0, False, 0.0 if speed is None else speed.value)
        columns = zip(self._columns(), values, strict=True)
        self._set_columns([np.insert(column, row, value) for column, value in columns])

    def _columns(self) -> list[NDArray[Any]]:
        return [self._load, self._inflight, self._serving, self._measured_speeds]

    def _set_columns(self, columns: list[NDArray[Any]]) -> None:
        self._load, self._inflight, self._serving, self._measured_speeds = columns
        self._rows = {engine: row for row, engine in enumerate(self._engines)}
        self._speeds = None

    def _pause(self, engine: EngineId) -> None:
        if engine.name in self._measured:
            self._measured[engine.name].pause()

    def _fair_shares(self) -> Column:
        speeds = np.where(self._serving, self._relative_speeds(), 0.0)
        return speeds / max(speeds.sum(), 1e-300)

    def _relative_speeds(self) -> Column:
        if self._speeds is None:
            measured = self._measured_speeds[self._serving]
            known = measured[measured > 0]
            mean = known.mean() if len(known) else 1.0
            least = known.max(initial=0.0) / _MAX_SPEED_RATIO
            self._speeds = np.ones(len(self._engines))
            self._speeds[self._serving] = np.maximum(np.where(measured > 0, measured, mean), least)
        return self._speeds

    def check_integrity(self) -> None:
        assert self._engines == sorted(self._rows)
        assert all(self._engines[row] == engine for engine, row in self._rows.items())
        assert {len(column) for column in self._columns()} == {len(self._engines)}
        assert (self._relative_speeds() > 0).all(), self._speeds
        assert (self._inflight >= 0).all(), self._inflight
        assert (self._load >= 0).all(), self._load
        assert not self._load[self._inflight == 0].any(), (self._load, self._inflight)


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
