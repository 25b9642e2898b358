"""Chooses an engine for a request. Pure: no clock, socket or task inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from umbra.runtime.rollout.dispatch.engine_speed import EngineSpeed

# An engine that holds the request's prefix is preferred while its load exceeds that of the idlest
# one by at most this many requests of the same cost, about one group. Higher piles long groups onto
# one engine; lower scatters them, and each engine prefills the prompt again.
_AFFINITY_REQUESTS: Final = 16
# No engine counts as more than this many times slower than the fastest. A slow engine still gets
# some requests, so that it can be measured again. Higher strands an engine that once stalled.
_MAX_SPEED_RATIO: Final = 8.0
# Interval of comparing speeds. Longer follows changes late; shorter computes them for every batch
# of every engine, while averages over ten seconds have not moved.
_COMPARED_FOR_S: Final = 0.5


class EngineId(NamedTuple):
    """One incarnation of an engine."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class Router:
    """Chooses the serving engine with the least work, and prefers those that have the prefix.

    Outstanding tokens are what an engine may still have to process: prompt plus budget of the
    requests given to it, less what it has produced. Divided by its speed they are its
    outstanding work, in seconds but for a factor that all engines share. An engine that has not
    been measured counts as the mean of those that have.

    Args:
        max_inflight: requests an engine may hold at a time.
    """

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._load: dict[EngineId, int] = {}
        self._inflight: dict[EngineId, int] = {}
        self._serving: set[EngineId] = set()
        # By name: the next incarnation runs on the same hardware. One entry per engine of the pool.
        self._measured: dict[str, EngineSpeed] = {}
        self._speeds: dict[EngineId, float] = {}  # of serving engines; empty: must be computed
        self._compare_at_s = 0.0

    def set_serving(self, engine: EngineId, serving: bool) -> None:
        """Allows or forbids new requests to an engine; requests that it holds stay counted."""
        self._load.setdefault(engine, 0)
        self._inflight.setdefault(engine, 0)
        self._speeds = {}
        if serving:
            self._serving.add(engine)
        else:
            self._serving.discard(engine)
            self._pause(engine)

    def remove(self, engine: EngineId) -> None:
        """Removes an engine and all it held."""
        self._serving.discard(engine)
        self._speeds = {}
        self._load.pop(engine, None)
        self._inflight.pop(engine, None)
        self._pause(engine)

    @property
    def serving(self) -> list[EngineId]:
        return sorted(self._serving)

    def outstanding_tokens(self, engine: EngineId) -> int:
        return self._load.get(engine, 0)

    def capacity_left(self, engine: EngineId) -> int:
        """Number of requests that the engine may still be given."""
        return self._max_inflight - self._inflight.get(engine, self._max_inflight)

    def choose(self, cost: int, prefer: Iterable[EngineId | None] = ()) -> EngineId | None:
        """The engine for a request of `cost` tokens, or None while all are full.

        Args:
            prefer: engines that may have the prefix cached, best first.
        """
        free = [e for e in self._serving if self._inflight[e] < self._max_inflight]
        if not free:
            return None
        speeds = self._relative_speeds()
        idlest = min(free, key=lambda e: ((self._load[e] + cost) / speeds[e], e))
        limit = (self._load[idlest] + _AFFINITY_REQUESTS * cost) / speeds[idlest]
        for engine in prefer:
            if engine is None or engine not in free:
                continue
            if self._load[engine] / speeds[engine] <= limit:
                return engine
        return idlest

    def fair_share(self, engine: EngineId) -> float:
        """The share of all outstanding tokens that a serving engine has when loads are even."""
        speeds = self._relative_speeds()
        return speeds[engine] / sum(speeds.values())

    def charge(self, engine: EngineId, cost: int) -> None:
        """Counts a request that was given to the engine."""
        self._load[engine] += cost
        self._inflight[engine] += 1

    def progress(self, engine: EngineId, num_tokens: int) -> None:
        """Counts tokens that the engine produced."""
        if engine in self._load:
            self._load[engine] -= num_tokens

    def release(self, engine: EngineId, num_unused: int) -> None:
        """Counts the end of a request that left `num_unused` of its cost unused."""
        if engine in self._load:
            self._load[engine] -= num_unused
            self._inflight[engine] -= 1
            if self._inflight[engine] == 0:
                self._pause(engine)

    def measure(self, engine: EngineId, num_tokens: int, now: float) -> None:
        """Updates the engine's speed with a batch of tokens from the requests that it holds.

        Must be called before the batch's tokens and finishes are counted.

        Args:
            now: monotonic seconds.
        """
        if engine in self._serving:
            speed = self._measured.setdefault(engine.name, EngineSpeed())
            speed.observe(num_tokens, self._inflight[engine], now)
            if now >= self._compare_at_s:
                self._speeds = {}
                self._compare_at_s = now + _COMPARED_FOR_S

    def _pause(self, engine: EngineId) -> None:
        if engine.name in self._measured:
            self._measured[engine.name].pause()

    def _relative_speeds(self) -> dict[EngineId, float]:
        if not self._speeds:
            serving = self.serving  # sorted, so that the floating-point sums are reproducible
            known = {e: v for e in serving if (v := self._measured_speed(e)) > 0}
            mean = sum(known.values()) / len(known) if known else 1.0
            least = max(known.values(), default=1.0) / _MAX_SPEED_RATIO
            self._speeds = {e: max(known.get(e, mean), least) for e in serving}
        return self._speeds

    def _measured_speed(self, engine: EngineId) -> float:
        """The measured speed; 0 without a measurement."""
        speed = self._measured.get(engine.name)
        return 0.0 if speed is None else speed.value

    def check_integrity(self) -> None:
        """Asserts that nothing is counted twice or lost."""
        assert self._load.keys() == self._inflight.keys()
        assert self._serving <= self._load.keys()
        assert not self._speeds or self._speeds.keys() == self._serving
        assert all(speed > 0 for speed in self._speeds.values()), self._speeds
        for engine, count in self._inflight.items():
            assert count >= 0, (engine, count)
            assert self._load[engine] >= 0, (engine, self._load[engine])
            assert count or self._load[engine] == 0, (engine, self._load[engine])
