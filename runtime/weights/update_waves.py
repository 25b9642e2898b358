"""Rolling updates: which engines of a pool get a version now, and which generate meanwhile.

    publish(v)   sync of v: wave 1      sync of v: wave 2      remaining: none
    engine a     update to v            serves v               serves v
    engine b     serves v - 1           update to v            serves v

Every wave is a sync of its own. The first one commits the version. Each report lists the engines
that still lack it, and the ranks, which all get the same report, publish the version again until
none does. Pure: no clock, task or socket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.weights.engine_sync import SyncEngine

_ABLE_STATES: Final = frozenset(
    {EngineState.SERVING, EngineState.PAUSED, EngineState.PENDING_WEIGHTS, EngineState.ASLEEP}
)

E = TypeVar("E", bound=SyncEngine)


def able_engines(engines: Iterable[E]) -> list[E]:
    """Engines that can take part in a sync."""
    return [engine for engine in engines if engine.lifecycle.state in _ABLE_STATES]


def choose_wave(lacking: Sequence[E], num_waves_left: int) -> list[E]:
    """The engines to update next among those that lack a version: about an even share of them.

    Engines that do not serve come first, and all at once, because their update stops nobody. Then
    come those with the oldest weights, left behind by an unfinished update. The last wave takes
    all, so that waves end whatever happens between them.
    """
    size = math.ceil(len(lacking) / max(1, num_waves_left))
    num_idle = sum(not _is_serving(engine) for engine in lacking)
    ordered = sorted(lacking, key=lambda e: (_is_serving(e), e.lifecycle.version or 0))
    return ordered[: max(size, num_idle)]


def remaining(able: Iterable[SyncEngine], version: int) -> list[str]:
    """Engines that hold an older version than `version`, and serve it or may serve it again.

    Engines without any version (PENDING_WEIGHTS) make no tokens; they wait for a catch-up sync.
    """
    return [engine.name for engine in able if engine.lifecycle.version not in (None, version)]


def _is_serving(engine: SyncEngine) -> bool:
    return engine.lifecycle.state == EngineState.SERVING
