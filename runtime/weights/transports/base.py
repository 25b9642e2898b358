"""The interface of a transport: one way for the bytes of a sync. Each has a folder here.

    plan       supervisor   find_problem, lay_out      whether it can be used, and where things are
    sender     rank         send                       writes the rank's shards, or exports them
    receiver   engine       load, verify               reads them into the engine's parameters

`weights/transport_choice.py` chooses between plans. Torch-free, as are all plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_calls import Region, SyncGrant
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import Offer

TransportName = Literal["memfd", "cuda_ipc"]


class ProbedEngine(Protocol):
    """An engine that can check whether it can read what ranks export.

    `probe_import` returns why allocations (`rank_exports`) cannot be opened, or "".
    """

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a transport cannot be used. It is logged as a warning if the transport was expected to
    work."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The location of the tensors of one sync.

    Attributes:
        names: names of the buckets, for ranks and engines; empty without buckets.
        details: other facts that engines need.
        num_buckets: steps that the control block counts.
    """

    names: Sequence[str]
    details: Mapping[str, Any]
    num_buckets: int


class TransportPlan(Protocol):
    """The supervisor's part, one for each pool. It checks and decides; no bytes go through it.

    Attributes:
        reads_exports: engines read the ranks' own memory, so nothing else may use it before they
            are done.
    """

    name: TransportName
    reads_exports: bool

    async def find_problem(
        self, offers: Sequence[Offer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        """Why it cannot be used now with the offers of all ranks and these engines; None if it
        can."""
        ...

    def can_reach(self, engine: ProbedEngine) -> bool:
        """Whether this incarnation of an engine can take part."""
        ...

    def lay_out(
        self,
        manifest: Manifest,
        bucket_nbytes: int,
        offers: Sequence[Offer],
        *,
        has_checksums: bool,
    ) -> Layout:
        """Raises WeightSyncError if the system has no memory or descriptors for it."""
        ...


class Sender(Protocol):
    """A rank's part. Its publisher owns it, over all syncs.

    Attributes:
        is_read_by_engines: engines read the tensors until all have loaded; else `send` itself reads
            them.
    """

    is_read_by_engines: bool

    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Hands over the rank's shards; returns what was sent, or None if the sync was aborted.

        Raises:
            ProtocolError: the ranks publish different tensors.
            DeadlineExceeded: `deadline`, on the monotonic clock, has passed.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Receiver(Protocol):
    """An engine's part in one sync. Calls block, from one thread except `stop`."""

    def load(self) -> int:
        """Fills the engine's parameters and returns the bytes. Raises WeightSyncError if
        aborted."""
        ...

    def verify(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Returns {"count", "nbytes", "mismatches"} of the regions; raises WeightSyncError before
        everything is loaded."""
        ...

    def stop(self) -> None:
        """Ends a `load` that waits. From any thread."""
        ...

    def close(self) -> None:
        """Leaves the sync. Idempotent."""
        ...
