"""The interface of a transport, one way for the bytes of a sync, and the choice of one.

    plan       supervisor   find_problem, lay_out      whether it can be used, and where things are
    sender     rank         send                       writes the rank's shards, or exports them
    receiver   engine       load, verify               reads them into the engine's parameters

A transport also carries the progress of its syncs, which the supervisor sees as `TransferProgress`.
`TransportChooser` chooses between plans. Torch-free, as are all plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from umbra.runtime.engine_api.pool_settings import TransportSetting
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_messages import Region, SyncBegin, SyncGrant, TransportName

logger = logging.getLogger(__name__)


class ProbedEngine(Protocol):
    """An engine that can probe the ranks' exports; `probe_import` returns why it
    cannot read them."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def node_id(self) -> str: ...
    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a transport cannot be used; logged as a warning if it was expected to work."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOrder:
    """Inputs of a sync's layout. Engines' indices are their numbers in the sync. Ranks may keep
    sent bytes (`keeps_sent`) so that a later sync can send their changes (`sends_deltas`)."""

    manifest: Manifest
    bucket_nbytes: int
    ranks: Sequence[SyncBegin]
    engines: Sequence[ProbedEngine]
    has_checksums: bool
    timeout_s: float
    keeps_sent: bool = False
    sends_deltas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The location of the tensors of one sync.

    Attributes:
        rank_details: facts that a rank needs, by its number.
        engine_details: facts that an engine needs, by its number; "progress" is for its own
            reports. An engine without an entry cannot take part.
        num_buckets: steps that `progress` counts.
    """

    rank_details: Callable[[int], Mapping[str, Any]]
    engine_details: Mapping[int, Mapping[str, Any]]
    progress: TransferProgress
    num_buckets: int


class TransferProgress(Protocol):
    """The progress of a sync, for the supervisor. Ranks and engines are numbered."""

    @property
    def is_aborted(self) -> bool: ...

    def num_filled(self) -> list[int]: ...

    def num_loaded(self, engine: int) -> int: ...

    def has_work(self, engine: int) -> bool:
        """Whether it has buckets to load or to pass on. If not, it waits for others."""
        ...

    def is_cut_off(self, engine: int) -> bool:
        """Whether the sync continues without this engine, because its node's receiver was lost."""
        ...

    def abort(self) -> None:
        """Makes ranks and engines stop."""
        ...

    def dismiss(self, engine: int) -> None:
        """Called when this engine is lost: nobody waits for it any more."""
        ...


def find_distance(ranks: Sequence[SyncBegin], engines: Sequence[ProbedEngine]) -> Problem | None:
    """The problem of a transport that works only within a node, if there are several."""
    nodes = {f"rank {rank.rank}": rank.node_id for rank in ranks}
    nodes |= {engine.name: engine.node_id for engine in engines}
    first = next(iter(nodes))
    for name, node_id in nodes.items():
        if node_id != nodes[first]:
            return Problem(f"{first} is on node {nodes[first]}, {name} on node {node_id}")
    return None


class TransportPlan(Protocol):
    """The supervisor's part, one for each pool. It checks and decides; no bytes go through it."""

    name: TransportName

    async def find_problem(
        self, ranks: Sequence[SyncBegin], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        """Why it cannot be used now; None if it can."""
        ...

    def can_reach(self, engine: ProbedEngine) -> bool: ...

    def lay_out(self, order: LayoutOrder) -> AbstractAsyncContextManager[Layout]:
        """The layout of one sync, until the block ends. Raises WeightSyncError without memory."""
        ...


class Sender(Protocol):
    """A rank's part, owned by its publisher over all syncs. Engines read the tensors until all have
    loaded if `is_read_by_engines`, else `send` does. `network_nbytes` counts the last `send`."""

    is_read_by_engines: bool
    network_nbytes: int

    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Hands over the rank's shards; returns their regions, or None if the sync was aborted.
        Raises ProtocolError if ranks publish different tensors, DeadlineExceeded after `deadline`,
        which is on the monotonic clock."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Receiver(Protocol):
    """An engine's part in one sync. Calls block, from one thread except `stop`."""

    def load(self) -> int:
        """Fills the engine's parameters; returns the bytes. Raises WeightSyncError if aborted."""
        ...

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """See `WeightReceiver.verify`."""
        ...

    def stop(self) -> None:
        """Ends a `load` that waits. From any thread."""
        ...

    def close(self) -> None:
        """Leaves the sync. Idempotent."""
        ...


class TransportChooser:
    """Chooses the transport of each sync of one pool: the first of `plans`, fastest first, that can
    be used. Any `setting` but "auto" allows only that transport."""

    def __init__(
        self, pool: str, setting: TransportSetting, plans: Sequence[TransportPlan]
    ) -> None:
        self._pool = pool
        self._setting = setting
        self._plans = [plan for plan in plans if setting in ("auto", plan.name)]
        self._logged: tuple[TransportName, str] | None = None

    async def choose(
        self, ranks: Sequence[SyncBegin], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> TransportPlan:
        """Raises WeightSyncError if no allowed transport can be used."""
        problems: list[Problem] = []
        for plan in self._plans:
            problem = await plan.find_problem(ranks, engines, timeout_s)
            if problem is None:
                self._log(plan.name, problems)
                return plan
            problems.append(problem)
        others = "Set pool.transport = 'auto' to use any that works."
        raise WeightSyncError(
            f"pool {self._pool}: transport {self._setting!r} is unavailable: {_reasons(problems)}."
            + ("" if self._setting == "auto" else f" {others}")
        )

    def _log(self, name: TransportName, problems: Sequence[Problem]) -> None:
        """Logs a choice that differs from the last one, with the problems of faster transports."""
        reason = _reasons(problems) if problems else "all ranks and engines can"
        if self._setting == name:
            reason = "pool.transport sets it"
        if self._logged == (name, reason):
            return
        self._logged = name, reason
        level = logging.WARNING if any(p.is_warning for p in problems) else logging.INFO
        logger.log(level, "pool %s: weights travel by %s: %s", self._pool, name, reason)


def _reasons(problems: Sequence[Problem]) -> str:
    return "; ".join(dict.fromkeys(problem.text for problem in problems))
