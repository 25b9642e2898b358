"""What a transport is: one way for the bytes of a sync. A folder here for each.

    plan       supervisor   find_problem, lay_out      whether it can be used, and where things are
    sender     rank         send                       writes the rank's shards, or exports them
    receiver   engine       load, verify               reads them into the engine's parameters

Plans are chosen in `weights/transport_choice.py`. Torch-free, as are all plans.
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
    """An engine that can be asked whether it can read what ranks export.

    `probe_import` says why allocations (`rank_exports`) cannot be opened, or "".
    """

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a transport cannot be used. A warning: it was expected to work."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tensors of one sync are.

    Attributes:
        names: of the buckets, for ranks and engines; none where there are no buckets.
        details: what engines need besides.
        num_buckets: steps that are counted in the control block.
    """

    names: Sequence[str]
    details: Mapping[str, Any]
    num_buckets: int


class TransportPlan(Protocol):
    """The supervisor's part, one for each pool. Checks and decides; no bytes go through it.

    Attributes:
        reads_exports: engines read the ranks' own memory, so nothing else may use it before they
            have.
    """

    name: TransportName
    reads_exports: bool

    async def find_problem(
        self, offers: Sequence[Offer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        """What prevents its use now, with what all ranks offer and by these engines."""
        ...

    def can_reach(self, engine: ProbedEngine) -> bool:
        """Whether this life of an engine can take part."""
        ...

    def lay_out(
        self,
        manifest: Manifest,
        bucket_nbytes: int,
        offers: Sequence[Offer],
        *,
        has_checksums: bool,
    ) -> Layout:
        """Raises WeightSyncError where the system has no memory or descriptors for it."""
        ...


class Sender(Protocol):
    """A rank's part. Owned by its publisher, over all syncs.

    Attributes:
        is_read_by_engines: they read the tensors until all have loaded; else `send` has read them.
    """

    is_read_by_engines: bool

    def send(self, grant: SyncGrant, deadline: float) -> list[Region] | None:
        """Hands the rank's shards over; what was sent, or None where the sync was given up.

        Raises:
            ProtocolError: the ranks publish different tensors.
            DeadlineExceeded: on the monotonic clock.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Receiver(Protocol):
    """An engine's part in one sync. Blocks; one thread, `stop` excepted."""

    def load(self) -> int:
        """Fills the engine's parameters; the bytes. Raises WeightSyncError where given up."""
        ...

    def verify(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """{"count", "nbytes", "mismatches"} of the regions; raises WeightSyncError before all is
        loaded."""
        ...

    def stop(self) -> None:
        """Ends a `load` that waits. From any thread."""
        ...

    def close(self) -> None:
        """Leaves the sync. Idempotent."""
        ...
