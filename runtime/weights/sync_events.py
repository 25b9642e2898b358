"""The events and actions of `SyncTransaction`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_calls import Region
from umbra.runtime.weights.transports.base import RankOffer

# Events.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A rank called sync_begin. Rank 0 sends the layout; each makes its offer to transports."""

    rank: int
    world_size: int
    version: int
    manifest: Manifest | None
    offer: RankOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The answer to `Open`: these engines take part. With `connects`, ranks wait
    for all of them."""

    engines: Sequence[str]
    connects: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFilled:
    """A rank has written its part of all buckets. Unless `is_released`, `RankReleased` follows."""

    rank: int
    regions: Sequence[Region]
    network_nbytes: int
    is_released: bool


@dataclass(frozen=True, slots=True)
class RankReleased:
    """This rank holds nothing that prevents engines from allocating their KV cache."""

    rank: int


@dataclass(frozen=True, slots=True)
class EnginePrepared:
    """The engine has the layout."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The engine has read its tensors from all buckets."""

    engine: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineVerified:
    """The engine has compared the checksums of its parameters with the ranks'."""

    engine: str
    mismatches: Sequence[str]


@dataclass(frozen=True, slots=True)
class EngineCommitted:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineReverted:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine raised an error, was late, or died."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineCutOff:
    """The engine, which has not failed, cannot get the version: its node's receiver was lost."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """A rank aborted or died, or the supervisor cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    lease_s: float
    progress: str


Event = (
    RankJoined
    | Opened
    | RankFilled
    | RankReleased
    | EnginePrepared
    | EngineLoaded
    | EngineVerified
    | EngineCommitted
    | EngineReverted
    | EngineFailed
    | EngineCutOff
    | Aborted
    | LeaseExpired
)

# Actions.


@dataclass(frozen=True, slots=True)
class Open:
    """Choose transport and engines, make the control block; answer with `Opened` or `Aborted`."""

    manifest: Manifest
    offers: Sequence[RankOffer]  # of each rank


@dataclass(frozen=True, slots=True)
class Prepare:
    """Take the layout, then pause, unless the transport connects ranks with engines."""

    engine: str


@dataclass(frozen=True, slots=True)
class GrantBegin:
    """Every rank may fill buckets: sync_begin returns."""


@dataclass(frozen=True, slots=True)
class GrantFilled:
    """Every rank has filled and every engine has loaded everything: sync_filled returns."""


@dataclass(frozen=True, slots=True)
class Load:
    """Pause, if the engine still generates and once its node has everything; wake the weights, and
    load all buckets."""

    engine: str


@dataclass(frozen=True, slots=True)
class Verify:
    engine: str


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """The point of no return: the pool's version is the new one."""


@dataclass(frozen=True, slots=True)
class Commit:
    engine: str


@dataclass(frozen=True, slots=True)
class Revert:
    """Undo the update. Untouched engines continue serving."""

    engine: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Kill and replace the engine; the ranks no longer wait for it."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRanks:
    """Every call of every rank, pending or later, raises `WeightSyncError(reason)`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Action = (
    Open
    | Prepare
    | GrantBegin
    | GrantFilled
    | Load
    | Verify
    | CommitVersion
    | Commit
    | Revert
    | Discard
    | FailRanks
    | Report
    | Close
)
