"""The GPU memory that a rank exports, in the form that crosses processes. Torch-free.

    rank ──exports──▶ supervisor ──all ranks' exports──▶ engine ──▶ its workers

Plain numbers and bytes: the supervisor checks their bounds and does not interpret them. A rank's
exports travel packed, because most syncs repeat the last one's: equal bytes need not be read again.
`from_wire` raises ProtocolError for anything that `to_wire` could not have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, Self, cast

import msgpack

from umbra.runtime.errors import ProtocolError, brief
from umbra.runtime.weights.manifest import ITEMSIZES, MAX_DIMS, MAX_IMAGE_NBYTES, MAX_TENSORS

UUID_NBYTES: Final = 16
HANDLE_NBYTES: Final = 64  # a CUDA IPC memory handle
_MAX_BUFFER_ID: Final = (1 << 64) - 1
_MAX_SOCKET_PATH_NBYTES: Final = 107
_MAX_NAME_LEN: Final = 64
_MAX_CHUNKS: Final = 1 << 20
_NUM_KEPT: Final = 64
# Exports cached by their bytes, for the ranks of a node and more than one pool. With fewer, a
# supervisor of many ranks reads them all again in each sync.


@dataclass(frozen=True, slots=True)
class ChunksHandle:
    """Physical chunks of torch's expandable segments, of one size, adjacent in the
    exporter's address space. Their descriptors are deposited in order, under a name that no
    other deposit has."""

    fd_socket: str
    name: str
    num_chunks: int

    def to_wire(self) -> list[Any]:
        return [self.fd_socket, self.name, self.num_chunks]

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match raw:
            case [str(fd_socket), str(name), int(num_chunks)] if (
                0 < len(fd_socket.encode(errors="replace")) <= _MAX_SOCKET_PATH_NBYTES
                and "\0" not in fd_socket
                and 0 < len(name) <= _MAX_NAME_LEN
                and name.isascii()
                and name.isalnum()
                and type(num_chunks) is int
                and 1 <= num_chunks <= _MAX_CHUNKS
            ):
                return cls(fd_socket, name, num_chunks)
            case _:
                raise ProtocolError(f"not a handle of GPU memory: {brief(raw)}")


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPU memory that another process can open, as a whole. Equal allocations refer to
    the same memory.

    Attributes:
        device: the GPU's UUID; its index may differ between processes.
        handle: CUDA's handle, valid while the exporter lives and keeps the memory; or that of
            chunks, which share `nbytes` evenly.
        buffer_id: the driver's number, or the first chunk's, which no other allocation of the
            exporter ever gets; a handle may be reused.
    """

    device: bytes
    handle: bytes | ChunksHandle
    nbytes: int
    buffer_id: int

    def to_wire(self) -> list[Any]:
        handle = self.handle if isinstance(self.handle, bytes) else self.handle.to_wire()
        return [self.device, handle, self.nbytes, self.buffer_id]

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        match cast("Any", raw):
            case [bytes(device), handle, int(nbytes), int(buffer_id)] if (
                len(device) == UUID_NBYTES
                and 0 < nbytes <= MAX_IMAGE_NBYTES
                and 0 <= buffer_id <= _MAX_BUFFER_ID
            ):
                return cls(device, _read_handle(handle, nbytes), nbytes, buffer_id)
            case _:
                raise ProtocolError(f"not an allocation of a GPU: {brief(raw)}")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rank's part of one tensor: a strided view of an allocation.

    Attributes:
        offset: first byte in the image, in the dtype of the manifest.
        allocation: index of the allocation among the rank's.
        start: byte of the allocation at which the first element is.
        dtype: the rank's; engines cast.
        strides: in elements.
    """

    offset: int
    allocation: int
    start: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span_nbytes(self) -> int:
        """Bytes from its first to its last in the allocation."""
        steps = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return (steps + 1) * ITEMSIZES[self.dtype]

    def to_wire(self) -> list[Any]:
        return [
            *(self.offset, self.allocation, self.start, self.dtype),
            *(list(self.shape), list(self.strides)),
        ]

    @classmethod
    def from_wire(cls, raw: object, allocations: Sequence[Allocation]) -> Self:
        """Raises ProtocolError for a part that is not inside its allocation."""
        match cast("Any", raw):
            case [int(offset), int(allocation), int(start), str(dtype), shape, strides]:
                sizes, steps = _numbers(shape, 1), _numbers(strides, 0)
                part = cls(offset, allocation, start, dtype, sizes, steps)
                if (
                    dtype in ITEMSIZES
                    and len(sizes) == len(steps)
                    and 0 <= offset <= MAX_IMAGE_NBYTES
                    and 0 <= allocation < len(allocations)
                    and start >= 0
                    and start % ITEMSIZES[dtype] == 0
                    and start + part.span_nbytes <= allocations[allocation].nbytes
                ):
                    return part
            case _:
                pass
        raise ProtocolError(f"not a part of an exported allocation: {brief(raw)}")


@dataclass(frozen=True)
class RankExports:
    """All parts of the published tensors on one rank. `replicas` are among another rank's `parts`.
    With `keeps_memory`, engines may keep this memory open after the sync."""

    allocations: tuple[Allocation, ...]
    parts: tuple[TensorPart, ...]
    replicas: tuple[TensorPart, ...] = ()
    keeps_memory: bool = True

    def to_wire(self) -> bytes:
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        listed = self.allocations, self.parts, self.replicas
        packed: bytes = msgpack.packb(
            [*([each.to_wire() for each in some] for some in listed), self.keeps_memory]
        )
        return packed

    @staticmethod
    def from_wire(raw: object) -> RankExports:
        if not isinstance(raw, bytes):
            raise ProtocolError(f"not the exports of a rank: {brief(raw)}")
        return _read_exports(raw)


@lru_cache(_NUM_KEPT)
def _read_exports(packed: bytes) -> RankExports:
    try:
        raw = msgpack.unpackb(packed)
    except Exception as error:  # msgpack's errors have no common class
        raise ProtocolError(f"undecodable exports of a rank: {type(error).__name__}") from error
    match raw:
        case [allocations, parts, replicas, bool(keeps_memory)]:
            read = tuple(Allocation.from_wire(a) for a in _list(allocations, MAX_TENSORS))
            sent, held = (
                tuple(TensorPart.from_wire(part, read) for part in _list(some, MAX_TENSORS))
                for some in (parts, replicas)
            )
            return RankExports(read, sent, held, keeps_memory)
        case _:
            raise ProtocolError(f"not the exports of a rank: {brief(raw)}")


Offer = RankExports | str
"""The exports of a rank, or why it has none."""


def probe_allocations(exports: Sequence[RankExports]) -> list[Allocation]:
    """One allocation of every rank and GPU, for engines to open before they take part. Replicas are
    read on the engine's own GPU only, which needs no probe."""
    first: dict[tuple[int, bytes], Allocation] = {}
    for rank, exported in enumerate(exports):
        for part in exported.parts:
            allocation = exported.allocations[part.allocation]
            first.setdefault((rank, allocation.device), allocation)
    return list(first.values())


def _read_handle(raw: object, nbytes: int) -> bytes | ChunksHandle:
    if isinstance(raw, bytes) and len(raw) == HANDLE_NBYTES:
        return raw
    handle = ChunksHandle.from_wire(raw)
    if nbytes % handle.num_chunks:
        raise ProtocolError(f"not a handle of {nbytes} bytes: it has {handle.num_chunks} chunks")
    return handle


def _numbers(raw: object, least: int) -> tuple[int, ...]:
    values = _list(raw, MAX_DIMS)
    if not all(type(v) is int and least <= v <= MAX_IMAGE_NBYTES for v in values):
        raise ProtocolError(f"not the shape or strides of an exported part: {brief(raw)}")
    return tuple(values)


def _list(raw: object, limit: int) -> list[Any]:
    if not isinstance(raw, list):
        raise ProtocolError(f"expected a list in exports, got: {brief(raw)}")
    values = cast("list[Any]", raw)
    if len(values) > limit:
        raise ProtocolError(f"exports hold a list of {len(values)}; at most {limit} are allowed")
    return values
