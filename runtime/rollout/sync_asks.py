"""When waiting ranks are asked to carry the current weights to an engine once more."""

from __future__ import annotations

from collections.abc import Iterable

from umbra.runtime.rollout.router import EngineId


class SyncAsks:
    """Remembers which engines have been asked for, so that no request is made twice.

    An engine is asked for once as long as it stays PENDING_WEIGHTS; if it leaves that state
    and comes back (a sync that failed), it is asked for again.
    """

    def __init__(self) -> None:
        self._asked: set[EngineId] = set()

    def wanted(self, pending: Iterable[EngineId]) -> list[EngineId]:
        """Engines to ask for now, out of those that lack weights; each is returned once."""
        lacking = set(pending)
        self._asked &= lacking
        fresh = sorted(lacking - self._asked)
        self._asked.update(fresh)
        return fresh

    def observe(self, pending: Iterable[EngineId]) -> None:
        """Forgets engines that no longer lack weights; to be told of every change of state."""
        self._asked &= set(pending)
