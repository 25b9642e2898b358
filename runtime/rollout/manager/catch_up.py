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
"""Deadline for the supervisor's answer, which comes from memory."""


class SyncRequests:
    """Remembers which engines were reported to the ranks, so that no sync is requested twice. An
    engine is reported once for as long as it stays PENDING_WEIGHTS, and again if it leaves that
    state and comes back (after a sync that failed)."""

    def __init__(self) -> None:
        self._requested: set[EngineId] = set()

    def take_new(self, pending: Iterable[EngineId]) -> list[EngineId]:
        """The engines without weights that were not returned before."""
        lacking = set(pending)
        self._requested &= lacking
        fresh = sorted(lacking - self._requested)
        self._requested.update(fresh)
        return fresh

    def observe(self, pending: Iterable[EngineId]) -> None:
        """Forgets engines that have weights now; must be called on every change of state."""
        self._requested &= set(pending)


class Waiting(NamedTuple):
    """The ranks that wait for one answer, by its number; `is_complete` if no rank is missing."""

    call: CollectiveCall
    answer: int
    ranks: frozenset[int]
    is_complete: bool


class CatchUp:
    """Asks the supervisor which engines lack weights, and the waiting ranks to publish to them.

    The manager's view of the pool may be older than the ranks' latest sync (one that has ended
    passes through PENDING_WEIGHTS), so the supervisor decides.

    The supervisor also knows which ranks already wait for the others in `sync_begin` of the current
    version. A rank that waits here at that time missed the answer that sent the others there, and
    gets it now: without it that sync cannot continue. Ranks publish other versions on their own,
    all together, so this concerns the current version only.

    `waiting` returns the ranks that wait now, or None; `answer` sends one answer to all of them,
    unless their set has changed since the supervisor was asked.
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
        self._requests = SyncRequests()
        self._lacking = asyncio.Event()

    def observe(self, pending: Iterable[EngineId]) -> None:
        """Takes the engines without weights; must be called on every change of state."""
        self._requests.observe(pending)

    def look(self) -> None:
        """Starts a check: engines seem to lack weights while ranks wait, or ranks are missing."""
        self._lacking.set()

    async def run(self) -> None:
        while True:
            await self._lacking.wait()
            self._lacking.clear()
            waiting = self._waiting()
            try:
                lack = await self._supervisor.call(
                    "catch_up", self._pool, timeout_s=_CATCH_UP_TIMEOUT_S
                )
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow to answer; asking again: %s", error)
                self._lacking.set()
                continue
            if waiting is None or waiting != self._waiting():
                continue
            reason = self._reason(waiting, lack)
            if reason:
                logger.info("asking the ranks for version %d: %s", lack["version"], reason)
                self._answer({"kind": "sync_wanted", "version": lack["version"]})

    def _reason(self, waiting: Waiting, lack: Mapping[str, Any]) -> str:
        """Why the ranks should publish the current version once more; "" if they should not."""
        if lack["ranks"]:
            is_apart = waiting.ranks.isdisjoint(lack["ranks"])
            return f"ranks {lack['ranks']} wait for them in its sync" if is_apart else ""
        if not waiting.is_complete:
            return ""
        engines = self._requests.take_new(
            EngineId(name, number) for name, number in lack["engines"]
        )
        return f"{', '.join(map(str, engines))} came up without weights" if engines else ""
