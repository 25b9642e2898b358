"""Which engine takes a request. Pure: no clock, socket or task inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

# An engine that holds the request's prefix is taken while it is at most this many requests of
# the same cost busier than the idlest one: about one group. Higher piles long groups onto one
# engine, lower scatters them and prefills the prompt once per engine.
_AFFINITY_REQUESTS: Final = 16


class EngineId(NamedTuple):
    """One life of an engine."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class Router:
    """Least outstanding tokens among serving engines, with affinity to where the prefix is.

    Outstanding tokens are what an engine may still have to process: prompt plus budget of the
    requests given to it, less what it has produced.

    Args:
        max_inflight: requests an engine may hold at a time.
    """

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._load: dict[EngineId, int] = {}
        self._inflight: dict[EngineId, int] = {}
        self._serving: set[EngineId] = set()

    def set_serving(self, engine: EngineId, serving: bool) -> None:
        """An engine may take requests, or may not for now; what it holds stays counted."""
        self._load.setdefault(engine, 0)
        self._inflight.setdefault(engine, 0)
        if serving:
            self._serving.add(engine)
        else:
            self._serving.discard(engine)

    def remove(self, engine: EngineId) -> None:
        """The engine is gone with all it held."""
        self._serving.discard(engine)
        self._load.pop(engine, None)
        self._inflight.pop(engine, None)

    @property
    def serving(self) -> list[EngineId]:
        return sorted(self._serving)

    def outstanding_tokens(self, engine: EngineId) -> int:
        return self._load.get(engine, 0)

    def room(self, engine: EngineId) -> int:
        """Requests that the engine may still be given."""
        return self._max_inflight - self._inflight.get(engine, self._max_inflight)

    def choose(self, cost: int, prefer: Iterable[EngineId | None] = ()) -> EngineId | None:
        """The engine for a request of `cost` tokens, or None while none has room.

        Args:
            prefer: engines that may have the prefix cached, best first.
        """
        free = [e for e in self._serving if self._inflight[e] < self._max_inflight]
        if not free:
            return None
        idlest = min(free, key=lambda e: (self._load[e], e))
        limit = self._load[idlest] + _AFFINITY_REQUESTS * cost
        for engine in prefer:
            if engine is not None and engine in free and self._load[engine] <= limit:
                return engine
        return idlest

    def charge(self, engine: EngineId, cost: int) -> None:
        """A request was given to the engine."""
        self._load[engine] += cost
        self._inflight[engine] += 1

    def progress(self, engine: EngineId, num_tokens: int) -> None:
        """The engine produced tokens."""
        if engine in self._load:
            self._load[engine] -= num_tokens

    def release(self, engine: EngineId, rest: int) -> None:
        """A request ended with `rest` of its cost not used."""
        if engine in self._load:
            self._load[engine] -= rest
            self._inflight[engine] -= 1

    def check_integrity(self) -> None:
        """Asserts that nothing is counted twice or lost."""
        assert self._load.keys() == self._inflight.keys()
        assert self._serving <= self._load.keys()
        for engine, count in self._inflight.items():
            assert count >= 0, (engine, count)
            assert self._load[engine] >= 0, (engine, self._load[engine])
            assert count or self._load[engine] == 0, (engine, self._load[engine])
