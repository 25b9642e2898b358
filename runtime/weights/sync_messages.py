"""The messages of a weight sync, from each rank to the lead, and their answers. Torch-free.

    rank                                       supervisor
    SyncBegin       ──▶   SyncGrant    all ranks have joined, engines get ready
    SyncProgressed  ──▶   LinkState    over several nodes: buckets read, nodes gone
    SyncFilled      ──▶   None         all ranks have filled, all engines have loaded
    SyncEnd         ──▶   SyncReport   the version is committed, engines serve it
    SyncAbort       ──▶   None         the sync ends for every rank

The deadline of a message is on the monotonic clock of the process that holds it; between processes
it travels as time left.
"""

from __future__ import annotations

import builtins
import collections.abc
import time
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from umbra.runtime.engine_api.pool_settings import TransportName
from umbra.runtime.errors import DeadlineExceeded, ProtocolError, brief
from umbra.runtime.settings import annotations_of

Answer = TypeVar("Answer")

Region = tuple[int, int, int | None]
"""Image offset, nbytes and checksum of bytes that one rank sent."""

_MAX_RANKS: Final = 1 << 20
_MAX_TIMEOUT_S: Final = 1e9
# Bounds of values accepted from another process; far above any real job.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMessage(Generic[Answer]):
    """A message of one rank, which the lead answers."""

    rank: int
    deadline: float

    @property
    def left_s(self) -> float:
        """Raises DeadlineExceeded if nothing is left."""
        return remaining_s(self.deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGrant:
    """The facts that a rank needs to hand over its tensors. `num_buckets` and `details` are the
    transport's, from its `Layout`."""

    sync_id: str
    transport: TransportName
    bucket_nbytes: int
    num_buckets: int
    has_checksums: bool
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """A sync between nodes, as its ranks see it. `gone` are indices of nodes: ranks send them
    nothing more."""

    is_aborted: bool
    gone: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The outcome of a sync.

    Attributes:
        engines: name -> {"nbytes": bytes loaded, "load_s": seconds, waits included}.
        failed: name -> why this engine did not get the version; it is being replaced, or gets
            it with the next sync.
        remaining: engines that left the sync and still serve an older version. The ranks
            publish the version to them again.
        transport: by name; "" if no engine took part.
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

    def joined(self, later: SyncReport) -> SyncReport:
        added = ("network_nbytes", "prepare_s", "transfer_s", "verify_s", "resume_s")
        return replace(
            later,
            engines={**self.engines, **later.engines},
            failed={**self.failed, **later.failed},
            **{name: getattr(self, name) + getattr(later, name) for name in added},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBegin(SyncMessage[SyncGrant]):
    """A rank joins the sync of one version, with the `Sender.offer` of each transport. Rank 0 sends
    the `manifest`, in its wire form."""

    pool: str
    version: int
    world_size: int
    manifest: bytes | None
    offers: Mapping[TransportName, bytes | str]
    node_id: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= _MAX_RANKS:
            raise ProtocolError(f"rank {self.rank} is not one of {self.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaterMessage(SyncMessage[Answer]):
    sync_id: str

    @property
    def pool(self) -> str:
        return self.sync_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncProgressed(_LaterMessage[LinkState]):
    """A rank reports now and then how many buckets it has read; see `LinkProgress.observe`."""

    num_filled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFilled(_LaterMessage[None]):
    """A rank has written its part of every bucket, or exports all its tensors.

    Attributes:
        regions: sent by the rank; with checksums, also its replicas'.
        network_nbytes: of weights that it sent to other nodes.
        is_released: whether engines may allocate more memory when they have loaded. False if
            the rank first has work to do then; it sends `SyncEnd` after that.
    """

    regions: Sequence[Region]
    network_nbytes: int
    is_released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEnd(_LaterMessage[SyncReport]):
    """A rank waits for the outcome. It holds no memory that engines need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAbort(_LaterMessage[None]):
    reason: str


SyncCall = SyncBegin | SyncProgressed | SyncFilled | SyncEnd | SyncAbort
SyncAnswer = SyncGrant | LinkState | SyncReport | None


class SyncSession(Protocol):
    """The `Session` of a rank, as far as its publisher needs it. `fd_socket` is a descriptor server
    on the rank's node; other nodes reach this one at `tcp_host`, or not at all."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def node_id(self) -> str: ...
    @property
    def tcp_host(self) -> str: ...
    @property
    def fd_socket(self) -> str: ...

    def raise_if_lost(self) -> None:
        """Raises if the job is lost; called while a rank waits for buckets."""
        ...

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        """Blocks until the lead has answered. Raises `WeightSyncError` on all ranks if the sync
        fails, and DeadlineExceeded if the message's time is used up."""
        ...


def remaining_s(deadline: float) -> float:
    """Raises DeadlineExceeded if no time is left."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("the time for this sync is used up")
    return left_s


def encode(message: SyncMessage[Any] | SyncAnswer) -> dict[str, Any] | None:
    """Plain values that can cross processes. Raises DeadlineExceeded if the message's time is used
    up."""
    if message is None:
        return None
    plain: dict[str, Any] = {f.name: getattr(message, f.name) for f in fields(message)}
    if isinstance(message, SyncMessage):
        plain["deadline"] = message.left_s
    return {"kind": type(message).__name__, **plain}


def decode_call(raw: object) -> SyncCall:
    """Raises ProtocolError for values that `encode` could not have made of a rank's message."""
    return _decode(raw, typing.get_args(SyncCall))


def decode_answer(message: SyncMessage[Answer], raw: object) -> Answer:
    """The answer to `message`. Raises ProtocolError for values that `encode` could not have made of
    an answer, or made of the answer to another kind of message."""
    answer = None if raw is None else _decode(raw, (SyncGrant, LinkState, SyncReport))
    (expected,) = typing.get_args(cast("Any", type(message)).__orig_bases__[0])
    if type(answer) is not expected:
        raise ProtocolError(
            f"the answer to {type(message).__name__} must be {expected.__name__}, got "
            f"{type(answer).__name__}"
        )
    return cast("Answer", answer)


def _decode(raw: object, kinds: Sequence[Any]) -> Any:
    match cast("Any", raw):
        case {"kind": str(name), **values}:
            kind = next((kind for kind in kinds if kind.__name__ == name), None)
        case _:
            kind, values = None, {}
    hints = {} if kind is None else annotations_of(kind)
    if kind is None or values.keys() != hints.keys():
        raise ProtocolError(f"not a message of a weight sync: {brief(raw)}")
    read = {field: _read(values[field], hint) for field, hint in hints.items()}
    if "deadline" in read:
        read["deadline"] = _read_deadline(read["deadline"])
    return kind(**read)


def _read(value: Any, hint: Any) -> Any:
    arguments: tuple[Any, ...] = typing.get_args(hint)
    match typing.get_origin(hint):
        case None if hint is Any or type(value) is hint or (hint is float and type(value) is int):
            return value
        case types.UnionType if type(value) in arguments:
            return value
        case typing.Literal if isinstance(value, str) and value in arguments:
            return value
        case builtins.tuple:
            return _read_region(value)
        case collections.abc.Sequence if isinstance(value, list):
            return [_read(item, arguments[0]) for item in cast("list[Any]", value)]
        case collections.abc.Mapping if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {_read(key, arguments[0]): _read(item, arguments[1]) for key, item in items}
        case _:
            raise ProtocolError(f"expected {hint}, got {brief(value)}")


def _read_region(raw: Any) -> Region:
    match raw:
        case [int(offset), int(nbytes), int() | None as checksum] if min(offset, nbytes) >= 0:
            return offset, nbytes, checksum
        case _:
            raise ProtocolError(f"a region is [offset, nbytes, checksum], got {brief(raw)}")


def _read_deadline(left_s: float) -> float:
    if not 0 < left_s <= _MAX_TIMEOUT_S:
        raise ProtocolError(
            f"the time left for a sync is {left_s} s, expected more than 0 and at most "
            f"{_MAX_TIMEOUT_S:g}"
        )
    return time.monotonic() + left_s
