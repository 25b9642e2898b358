from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Set
from enum import Enum, auto
from typing import Final

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT_S: Final = 10.0
"""The supervisor answers from memory."""


class PoolLoad:
    """Reports whether a pool has work: the first state and each change, in order."""

    def __init__(self, supervisor: Handle, pool: str) -> None:
        self._supervisor = supervisor
        self._pool = pool
        self._has_work = False
        self._changed = asyncio.Event()
        self._changed.set()

    def observe(self, has_work: bool) -> None:
        if has_work != self._has_work:
            self._has_work = has_work
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            report = (self._pool, self._has_work)
            try:
                await self._supervisor.call("pool_has_work", *report, timeout_s=_REPORT_TIMEOUT_S)
            except DeadlineExceeded as error:
                logger.warning("the supervisor is slow to take a report; repeating it: %s", error)
                self._changed.set()


class _Use(Enum):
    BUSY = auto()
    NO_WORK = auto()
    UNAVAILABLE = auto()


class EngineIdleness:
    """Adds up engine-seconds by what each engine of the pool is doing. At any time an engine is

        busy         holding a request while it serves, or while it is paused: a drain finishes it
        no work      serving, and holding no request
        unavailable  anything else: asleep, waking, paused, updating, waiting for weights, starting
                     or dead, whether or not it holds frozen requests

    With B, N and U the seconds of each, summed over all engines since the last batch, or since an
    engine was first reported:

        engine_idle_share    = (N + U) / (B + N + U)
        engine_no_work_share =  N      / (B + N + U)

    This is the rollout manager's view: a request is held from its sending until its end has
    arrived, at most a tick after the engine made it. The cost is paid once per report and whenever
    an engine gets its first request or loses its last one, never per token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = clock()
        self._states: dict[str, tuple[EngineId, EngineState]] = {}  # by name
        self._holding: set[EngineId] = set()
        self._uses: dict[str, _Use] = {}
        self._counts = dict.fromkeys(_Use, 0)  # engines now
        self._engine_s = dict.fromkeys(_Use, 0.0)

    def report(self, engine: EngineId, state: EngineState) -> None:
        self._states[engine.name] = (engine, state)
        self._look_at(engine.name)

    def forget(self, name: str) -> None:
        """Called when the pool no longer has an engine of that name."""
        self._advance()
        del self._states[name]
        self._counts[self._uses.pop(name)] -= 1

    def hold(self, engine: EngineId, holds: bool) -> None:
        """The engine got its first request, or has none left."""
        if holds:
            self._holding.add(engine)
        else:
            self._holding.discard(engine)
        if engine.name in self._states:
            self._look_at(engine.name)

    def take_shares(self) -> dict[str, float]:
        """The shares since the last call; empty if there was no engine in that time."""
        self._advance()
        engine_s, self._engine_s = self._engine_s, dict.fromkeys(_Use, 0.0)
        total_s = sum(engine_s.values())
        if total_s <= 0:
            return {}
        no_work_s = engine_s[_Use.NO_WORK]
        return {
            "engine_idle_share": (no_work_s + engine_s[_Use.UNAVAILABLE]) / total_s,
            "engine_no_work_share": no_work_s / total_s,
        }

    def check_integrity(self, holding: Set[EngineId]) -> None:
        """Asserts that these engines hold requests, and that the counts agree."""
        assert self._holding == holding, (self._holding, holding)
        for name, (engine, state) in self._states.items():
            assert self._uses[name] == _use(state, engine in holding), name
        assert self._counts == {use: list(self._uses.values()).count(use) for use in _Use}

    def _look_at(self, name: str) -> None:
        self._advance()
        if name in self._uses:
            self._counts[self._uses[name]] -= 1
        engine, state = self._states[name]
        self._uses[name] = _use(state, engine in self._holding)
        self._counts[self._uses[name]] += 1

    def _advance(self) -> None:
        before, self._now = self._now, self._clock()
        for use, count in self._counts.items():
            self._engine_s[use] += count * (self._now - before)


def _use(state: EngineState, holds: bool) -> _Use:
    if holds and state in (EngineState.SERVING, EngineState.PAUSED):
        return _Use.BUSY
    return _Use.NO_WORK if state == EngineState.SERVING else _Use.UNAVAILABLE
