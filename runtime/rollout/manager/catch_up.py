"""Waiting ranks are asked to carry the current weights to an engine once more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.manager.rank_rendezvous import CollectiveCall
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

_CATCH_UP_TIMEOUT_S: Final = 10.0
"""For the supervisor to say which engines lack weights; it answers from memory."""


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


class Waiting(NamedTuple):
    """The ranks that wait for one answer.

    Attributes:
        answer: its number; no two have the same.
        are_all: no rank is missing.
    """

    wanted: CollectiveCall
    answer: int
    ranks: frozenset[int]
    are_all: bool


class CatchUp:
    """Asks the supervisor which engines lack weights, and the waiting ranks to bring them.

    What the manager has heard of the pool may be older than what the ranks have done since (a
    sync that has ended passes through PENDING_WEIGHTS), so the supervisor decides.

    It also knows the ranks that have been asked to, and wait for the others in `sync_begin` of the
    current version. A rank that waits here at that time was not reached by the same answer, and
    gets it now: without it that sync cannot go on. Ranks publish other versions of their own
    accord, all together, so nobody is told of those.

    Args:
        waiting: who waits now; None where nobody does. An answer to others than those that the
            supervisor was asked for is not given.
        answer: gives one answer to all of them.
    """

    def __init__(
        self,
        supervisor: Handle,
        pool: str,
        waiting: Callable[[], Waiting | None],
        answer: Callable[[dict[str, Any]], None],
    ) -> None:
        self._supervisor = supervisor
        self._pool = pool
        self._waiting = waiting
        self._answer = answer
        self._asks = SyncAsks()
        self._lacking = asyncio.Event()

    def observe(self, pending: Iterable[EngineId]) -> None:
        """To be told of every change of state."""
        self._asks.observe(pending)

    def look(self) -> None:
        """Engines seem to lack weights while ranks wait, or some ranks are missing."""
        self._lacking.set()

    async def run(self) -> None:
        """Lives until cancelled."""
        while True:
            await self._lacking.wait()
            self._lacking.clear()
            waiting = self._waiting()
            try:
                lack = await self._supervisor.call(
                    "catch_up", self._pool, timeout_s=_CATCH_UP_TIMEOUT_S
                )
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow; asking again: %s", error)
                self._lacking.set()
                continue
            if waiting is None or waiting != self._waiting():
                continue
            reason = self._reason(waiting, lack)
            if reason:
                logger.info("asking the ranks for version %d: %s", lack["version"], reason)
                self._answer({"kind": "sync_wanted", "version": lack["version"]})

    def _reason(self, waiting: Waiting, lack: Mapping[str, Any]) -> str:
        """Why they should publish the current version once more; "" if they should not."""
        if lack["ranks"]:
            is_apart = waiting.ranks.isdisjoint(lack["ranks"])
            return f"ranks {lack['ranks']} wait for them in its sync" if is_apart else ""
        if not waiting.are_all:
            return ""
        engines = self._asks.wanted(EngineId(name, life) for name, life in lack["engines"])
        return f"{', '.join(map(str, engines))} came up without weights" if engines else ""
