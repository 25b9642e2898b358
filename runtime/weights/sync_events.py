"""What happens to a sync, and what is to be done about it: the alphabet of `SyncTransaction`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from umbra.runtime.weights.manifest import Manifest

# -- events ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A rank called sync_begin. Rank 0 brings the layout."""

    rank: int
    world_size: int
    version: int
    manifest: Manifest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """After `Open`: these engines take part and the image is cut into so many buckets."""

    engines: Sequence[str]
    num_buckets: int
    num_buffers: int


@dataclass(frozen=True, slots=True)
class RankFilled:
    """A rank has written its part of bucket `idx`; regions are (offset, nbytes, checksum)."""

    rank: int
    idx: int
    regions: Sequence[tuple[int, int, int | None]]


@dataclass(frozen=True, slots=True)
class EnginePrepared:
    """It is paused, its weights have memory, and it accepts the layout."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    engine: str
    idx: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineAttested:
    """What it found in its own parameters."""

    engine: str
    count: int
    nbytes: int
    mismatches: Sequence[str]


@dataclass(frozen=True, slots=True)
class EngineCommitted:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineResumed:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineReverted:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """It raised, was late, or died."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """A rank gave up or is gone, or the supervisor cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    lease_s: float


Event = (
    RankJoined
    | Opened
    | RankFilled
    | EnginePrepared
    | EngineLoaded
    | EngineAttested
    | EngineCommitted
    | EngineResumed
    | EngineReverted
    | EngineFailed
    | Aborted
    | LeaseExpired
)

# -- actions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Choose engines and make the buckets; answer with `Opened`."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Prepare:
    engine: str


@dataclass(frozen=True, slots=True)
class GrantBegin:
    """Every rank may fill bucket 0: sync_begin returns."""


@dataclass(frozen=True, slots=True)
class GrantFill:
    """Every engine has loaded bucket `idx`, its memory may be filled again: sync_filled returns."""

    rank: int
    idx: int


@dataclass(frozen=True, slots=True)
class Load:
    """`is_first`: from here on the engine's weights are those of no version."""

    engine: str
    idx: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class Attest:
    engine: str


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """The point of no return: the pool's version is the new one."""


@dataclass(frozen=True, slots=True)
class Commit:
    engine: str


@dataclass(frozen=True, slots=True)
class Resume:
    engine: str


@dataclass(frozen=True, slots=True)
class Revert:
    """Give up the update. Untouched engines serve on as before."""

    engine: str
    is_touched: bool


@dataclass(frozen=True, slots=True)
class Discard:
    """Kill and replace the engine."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRanks:
    """Every call of every rank, waiting or to come, raises `WeightSyncError(reason)`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """sync_end returns."""


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing is left to do."""


Action = (
    Open
    | Prepare
    | GrantBegin
    | GrantFill
    | Load
    | Attest
    | CommitVersion
    | Commit
    | Resume
    | Revert
    | Discard
    | FailRanks
    | Report
    | Close
)
