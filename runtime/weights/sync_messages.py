"""The calls of a weight sync, from each rank to the supervisor. Torch-free.

    rank                                      supervisor
    sync_begin  ──SyncBegin──▶   SyncGrant    all ranks have joined, engines get ready
    sync_progress ──SyncProgressed──▶         over several nodes: buckets read, nodes gone
    sync_filled ──SyncFilled──▶               all ranks have filled, all engines have loaded
    sync_end    ──SyncEnd──▶     SyncReport   the version is committed, engines serve it
    sync_abort  ──SyncAbort──▶                the sync ends for every rank

A rank's publisher passes each call as one object to the `SyncCoordinator` of the pool. Its deadline
is on the monotonic clock of the process that holds it; between processes it travels as time left.
`from_wire` raises ProtocolError for anything that `to_wire` could not have made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol, Self, TypeVar, cast

from umbra.runtime.errors import DeadlineExceeded, ProtocolError, brief
from umbra.runtime.weights.rank_exports import Offer, offer_from_wire, offer_to_wire

T = TypeVar("T")

Region = tuple[int, int, int | None]
"""Image offset, nbytes and checksum of bytes that one rank sent."""

MAX_RANKS: Final = 1 << 20
_MAX_TIMEOUT_S: Final = 1e9
# Bounds of values accepted from another process; far above any real job.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    rank: int
    deadline: float

    @property
    def left_s(self) -> float:
        """Raises DeadlineExceeded if nothing is left."""
        return remaining_s(self.deadline)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for a message. Raises as `left_s`."""
        plain = _plain(self)
        del plain["deadline"]
        return plain | {"timeout_s": self.left_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBegin(_Call):
    """A rank joins the sync of one version. Rank 0 sends the `manifest`, in its wire form;
    receivers of other nodes reach the rank at `link_endpoint`, "HOST:PORT", or not at all."""

    pool: str
    version: int
    world_size: int
    manifest: bytes | None
    offer: Offer
    node_id: str
    link_endpoint: str

    def to_wire(self) -> dict[str, Any]:
        return _Call.to_wire(self) | {"offer": offer_to_wire(self.offer)}

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {
                "pool": str(pool),
                "version": int(version),
                "rank": int(rank),
                "world_size": int(world_size),
                "manifest": manifest,
                "offer": offer,
                "node_id": str(node_id),
                "link_endpoint": str(link_endpoint),
                "timeout_s": float(timeout_s),
            } if 0 <= rank < world_size <= MAX_RANKS and (
                manifest is None or isinstance(manifest, bytes)
            ):
                return cls(
                    pool=pool,
                    version=version,
                    rank=rank,
                    world_size=world_size,
                    manifest=manifest,
                    offer=offer_from_wire(offer),
                    node_id=node_id,
                    link_endpoint=link_endpoint,
                    deadline=_read_deadline(timeout_s),
                )
            case _:
                raise ProtocolError(f"not a rank's sync_begin: {brief(raw)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaterCall(_Call):
    sync_id: str

    @property
    def pool(self) -> str:
        return self.sync_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncProgressed(_LaterCall):
    """A rank reports now and then how many buckets it has read; see `LinkProgress.observe`."""

    num_filled: int

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {
                "sync_id": str(sync_id),
                "rank": int(rank),
                "num_filled": int(num_filled),
                "timeout_s": float(timeout_s),
            }:
                return cls(
                    sync_id=sync_id,
                    rank=rank,
                    num_filled=num_filled,
                    deadline=_read_deadline(timeout_s),
                )
            case _:
                raise ProtocolError(f"not a rank's sync_progress: {brief(raw)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFilled(_LaterCall):
    """A rank has written its part of every bucket, or exports all its tensors.

    Attributes:
        regions: sent by the rank; with checksums, also its replicas'.
        network_nbytes: of weights that it sent to other nodes.
        is_released: whether engines may allocate more memory when they have loaded. False if
            the rank first has work to do then; it calls `sync_end` after that.
    """

    regions: Sequence[Region]
    network_nbytes: int
    is_released: bool

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {
                "sync_id": str(sync_id),
                "rank": int(rank),
                "regions": regions,
                "network_nbytes": int(network_nbytes),
                "is_released": bool(is_released),
                "timeout_s": float(timeout_s),
            } if isinstance(regions, list):
                return cls(
                    sync_id=sync_id,
                    rank=rank,
                    regions=[_read_region(region) for region in cast("list[Any]", regions)],
                    network_nbytes=network_nbytes,
                    is_released=is_released,
                    deadline=_read_deadline(timeout_s),
                )
            case _:
                raise ProtocolError(f"not a rank's sync_filled: {brief(raw)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEnd(_LaterCall):
    """A rank waits for the outcome. It holds no memory that engines need."""

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {"sync_id": str(sync_id), "rank": int(rank), "timeout_s": float(timeout_s)}:
                return cls(sync_id=sync_id, rank=rank, deadline=_read_deadline(timeout_s))
            case _:
                raise ProtocolError(f"not a rank's sync_end: {brief(raw)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAbort(_LaterCall):
    reason: str

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {
                "sync_id": str(sync_id),
                "rank": int(rank),
                "reason": str(reason),
                "timeout_s": float(timeout_s),
            }:
                deadline = _read_deadline(timeout_s)
                return cls(sync_id=sync_id, rank=rank, reason=reason, deadline=deadline)
            case _:
                raise ProtocolError(f"not a rank's sync_abort: {brief(raw)}")


SyncCall = SyncBegin | SyncProgressed | SyncFilled | SyncEnd | SyncAbort


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGrant:
    """The facts that a rank needs to hand over its tensors. `num_buckets` counts tensors with
    cuda_ipc; `details` are the transport's, from its `Layout`."""

    sync_id: str
    transport: str
    bucket_nbytes: int
    num_buckets: int
    has_checksums: bool
    details: Mapping[str, Any]

    def to_wire(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {
                "sync_id": str(),
                "transport": "memfd" | "cuda_ipc" | "tcp",
                "bucket_nbytes": int(),
                "num_buckets": int(),
                "has_checksums": bool(),
                "details": dict(),
            }:
                return _of_fields(cls, cast("dict[str, Any]", raw))
            case _:
                raise ProtocolError(f"not the supervisor's grant of a sync: {brief(raw)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The outcome of a sync.

    Attributes:
        engines: name -> {"nbytes": bytes loaded, "load_s": seconds, waits included}.
        failed: name -> why this engine did not get the version; it is being replaced, or gets
            it with the next sync.
        remaining: engines that left the sync and still serve an older version. The ranks
            publish the version to them again.
        transport: by name.
        network_nbytes: of weights, that ranks sent to other nodes.
        prepare_s, transfer_s, verify_s, resume_s: seconds of each phase.
    """

    version: int
    transport: str
    engines: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str]
    remaining: Sequence[str]
    network_nbytes: int
    prepare_s: float
    transfer_s: float
    verify_s: float
    resume_s: float

    def to_wire(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case {
                "version": int(),
                "transport": str(),
                "engines": dict(),
                "failed": dict(),
                "remaining": list(),
                "network_nbytes": int(),
                "prepare_s": float(),
                "transfer_s": float(),
                "verify_s": float(),
                "resume_s": float(),
            }:
                return _of_fields(cls, cast("dict[str, Any]", raw))
            case _:
                raise ProtocolError(f"not the supervisor's report of a sync: {brief(raw)}")

    def joined(self, later: SyncReport) -> SyncReport:
        return SyncReport(
            version=self.version,
            transport=later.transport,
            engines={**self.engines, **later.engines},
            failed={**self.failed, **later.failed},
            remaining=later.remaining,
            network_nbytes=self.network_nbytes + later.network_nbytes,
            prepare_s=self.prepare_s + later.prepare_s,
            transfer_s=self.transfer_s + later.transfer_s,
            verify_s=self.verify_s + later.verify_s,
            resume_s=self.resume_s + later.resume_s,
        )


class SyncSupervisor(Protocol):
    """The supervisor as a rank's publisher sees it, in blocking calls. Each raises
    `WeightSyncError` on all ranks if the sync fails, and DeadlineExceeded if the call's time is
    used up. `node_id` and `fd_socket`, a descriptor server, are of the rank's node."""

    @property
    def node_id(self) -> str: ...

    @property
    def fd_socket(self) -> str: ...

    def check(self) -> None:
        """Raises if the job is lost; called while a rank waits for buckets."""
        ...

    def sync_begin(self, call: SyncBegin) -> SyncGrant: ...
    def sync_progress(self, call: SyncProgressed) -> Mapping[str, Any]: ...
    def sync_filled(self, call: SyncFilled) -> None: ...
    def sync_end(self, call: SyncEnd) -> SyncReport: ...
    def sync_abort(self, call: SyncAbort) -> None: ...


def remaining_s(deadline: float) -> float:
    """Raises DeadlineExceeded if no time is left."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("the time for this sync is used up")
    return left_s


def _plain(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in fields(message)}


def _of_fields(kind: type[T], raw: Mapping[str, Any]) -> T:
    return kind(**{field.name: raw[field.name] for field in fields(cast("Any", kind))})


def _read_deadline(timeout_s: float) -> float:
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ProtocolError(
            f"the time left for a sync is {timeout_s} s, expected more than 0 and at most "
            f"{_MAX_TIMEOUT_S:g}"
        )
    return time.monotonic() + timeout_s


def _read_region(raw: Any) -> Region:
    match raw:
        case [int(offset), int(nbytes), int() | None as checksum] if min(offset, nbytes) >= 0:
            return offset, nbytes, checksum
        case _:
            raise ProtocolError(f"a region is [offset, nbytes, checksum], got {brief(raw)}")
