"""The interface of a transport, one way for the bytes of a sync, and the choice of one.

    plan       supervisor   find_problem, lay_out      whether it can be used, and where things are
    sender     rank         offer, send                writes the rank's shards, or exports them

A plan and a sender belong to one row of `TRANSPORTS`. An engine reads either an image on its node
or the ranks' memory, and does not know the transport. A transport also carries the progress of its
syncs, which the supervisor sees as `TransferProgress`. Torch-free, as are all plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from umbra.runtime.engine_api.pool_settings import Transport, TransportSetting, allowed_transports
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_messages import Region, SyncBegin, SyncGrant

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
class RankOffer:
    """A rank in a sync, with the `offer` of its sender."""

    rank: int
    node_id: str
    offer: bytes | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOrder:
    """Inputs of a sync's layout. An engine's number in the sync is its index in `engines`. With
    `keeps_sent`, ranks keep the bytes that they send, and a later sync can send the changes alone
    (`sends_deltas`)."""

    manifest: Manifest
    bucket_nbytes: int
    ranks: Sequence[RankOffer]
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
        num_buckets: steps that `progress` counts: buckets of an image, or single tensors.
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


def find_distance(ranks: Sequence[RankOffer], engines: Sequence[ProbedEngine]) -> Problem | None:
    """The problem of a transport that works only within a node, if there are several."""
    nodes = {f"rank {rank.rank}": rank.node_id for rank in ranks}
    nodes |= {engine.name: engine.node_id for engine in engines}
    first = next(iter(nodes))
    for name, node_id in nodes.items():
        if node_id != nodes[first]:
            return Problem(f"{first} is on node {nodes[first]}, {name} on node {node_id}")
    return None


class TransportPlan(Protocol):
    """The supervisor's part, made of `PlanParts` for each pool. It checks and decides; no bytes go
    through it."""

    async def find_problem(
        self, ranks: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        """Why it cannot be used now; None if it can."""
        ...

    def can_reach(self, engine: ProbedEngine) -> bool: ...

    def lay_out(self, order: LayoutOrder) -> AbstractAsyncContextManager[Layout]:
        """The layout of one sync, until the block ends. Raises WeightSyncError without memory."""
        ...


class Sender(Protocol):
    """A rank's part, made of `SenderParts`, owned by its publisher over all syncs. Engines read the
    tensors until all have loaded if the transport `reads_ranks`, else `send` does. `network_nbytes`
    counts the last `send`."""

    network_nbytes: int

    def offer(self) -> bytes | str:
        """Gets ready for a sync; returns what the plan has to know about this rank."""
        return ""

    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Hands over the rank's shards; returns their regions, or None if the sync was aborted.
        Raises ProtocolError if ranks publish different tensors, DeadlineExceeded after `deadline`,
        which is on the monotonic clock."""
        ...

    def leave(self) -> None:
        """Called once the tensors are no longer read, before their memory is freed, and at the end
        of the sync. Idempotent."""
        return

    def close(self) -> None:
        """Frees what it keeps from one sync to the next. Idempotent."""
        ...


class TransportChooser:
    """Chooses the transport of each sync of one pool: the first that `setting` allows and that can
    be used."""

    def __init__(
        self,
        pool: str,
        setting: TransportSetting,
        make_plan: Callable[[Transport], TransportPlan],
    ) -> None:
        self._pool = pool
        self._setting = setting
        self._plans = [(each, make_plan(each)) for each in allowed_transports(setting)]
        self._logged: tuple[str, str] | None = None

    async def choose(
        self, ranks: Sequence[SyncBegin], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> tuple[Transport, TransportPlan, list[RankOffer]]:
        """The choice, with what the ranks offer to it. Raises WeightSyncError if no allowed
        transport can be used."""
        problems: list[Problem] = []
        for transport, plan in self._plans:
            offers = [
                RankOffer(rank=r.rank, node_id=r.node_id, offer=r.offers.get(transport.name, ""))
                for r in ranks
            ]
            problem = await plan.find_problem(offers, engines, timeout_s)
            if problem is None:
                self._log(transport, problems)
                return transport, plan, offers
            problems.append(problem)
        others = "Set pool.transport = 'auto' to use any that works."
        raise WeightSyncError(
            f"pool {self._pool}: transport {self._setting!r} is unavailable: {_reasons(problems)}."
            + ("" if self._setting == "auto" else f" {others}")
        )

    def _log(self, transport: Transport, problems: Sequence[Problem]) -> None:
        """Logs a choice that differs from the last one, with the problems of faster transports."""
        name = transport.name
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
