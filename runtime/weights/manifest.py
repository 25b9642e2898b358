"""The contents of a sync: names, dtypes, shapes and offsets of tensors in one flat image.

The image is in shared memory; with CUDA IPC it is only a way to count bytes. Every tensor starts at
a multiple of `ALIGNMENT`, in row-major order, without strides. Torch-free, because the supervisor
checks manifests too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, Self, cast

import msgpack

from umbra.runtime.engine_api.lora import LoraSpec
from umbra.runtime.errors import ProtocolError, brief

ALIGNMENT: Final = 256
# A multiple of every item size, so that neither a bucket nor a shard edge ever splits an element,
# and of a GPU's memory transaction. A larger value wastes image bytes on small tensors.

MAX_TENSORS: Final = 1 << 20
MAX_NAME_NBYTES: Final = 1024
MAX_DIMS: Final = 64
MAX_IMAGE_NBYTES: Final = 1 << 50
# Bounds of values accepted from another process; far above any real model.
_NUM_KEPT: Final = 16
# Manifests cached by their bytes: a process has one for each model that it syncs.

ITEMSIZES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element by dtype name (torch's name without `torch.`)."""
PIECE_NBYTES: Final = 32 << 20
# Mapped, and locked for a GPU, at a time, which takes about 2 ms without a lock. Larger pieces make
# the first buckets of a first sync wait; smaller ones cost more calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor in the image. `shape` is global, and `nbytes` has no padding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The layout of an image. It has no version: one layout serves many.

    Attributes:
        entries: ordered by offset, disjoint.
        aliases: other names of tied tensors -> the name in `entries` that has the bytes.
        nbytes: length of the image, padding included.
        lora: set if the tensors are a LoRA adapter for engines that keep their weights.
    """

    entries: tuple[TensorEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    nbytes: int
    lora: LoraSpec | None = None

    @classmethod
    def layout(
        cls,
        tensors: Iterable[tuple[str, str, Sequence[int]]],
        aliases: Mapping[str, str] | None = None,
        lora: LoraSpec | None = None,
    ) -> Self:
        """Places (name, dtype, shape) triples one after the other. Raises ValueError if a name is
        repeated, a dtype is unknown, an alias has no target, or the tensors do not suit `lora`."""
        entries: list[TensorEntry] = []
        cursor = 0
        for name, dtype, shape in tensors:
            if dtype not in ITEMSIZES:
                raise ValueError(f"tensor {name!r} has dtype {dtype!r}, which cannot be synced")
            nbytes = math.prod(shape) * ITEMSIZES[dtype]
            entries.append(
                TensorEntry(
                    name=name, dtype=dtype, shape=tuple(shape), offset=cursor, nbytes=nbytes
                )
            )
            cursor = align(cursor + nbytes)
        manifest = cls(
            entries=tuple(entries), aliases=dict(aliases or {}), nbytes=cursor, lora=lora
        )
        manifest.check()
        return manifest

    @property
    def payload_nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tied tensors come under each of their names."""
        shapes = {entry.name: entry.shape for entry in self.entries}
        return shapes | {alias: shapes[target] for alias, target in self.aliases.items()}

    def to_wire(self) -> bytes:
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        tensors = [[e.name, e.dtype, list(e.shape), e.offset] for e in self.entries]
        packed: bytes = msgpack.packb(
            {
                "tensors": tensors,
                "aliases": dict(self.aliases),
                "nbytes": self.nbytes,
                "lora": None if self.lora is None else self.lora.to_wire(),
            }
        )
        return packed

    @staticmethod
    def from_wire(raw: object) -> Manifest:
        """Raises ProtocolError for bytes that are no well-formed layout within the bounds. Equal
        bytes, which most syncs repeat, give the same object."""
        return _read_manifest(_typed(raw, bytes, "manifest"))

    def check(self) -> None:
        """Raises ValueError for a name that stands for two tensors, or for none, and for tensors
        that are not the adapter that `lora` describes."""
        names = {entry.name for entry in self.entries}
        if len(names) != len(self.entries):
            raise ValueError(f"{len(self.entries)} tensors have only {len(names)} distinct names")
        for alias, target in self.aliases.items():
            if alias in names or target not in names:
                raise ValueError(
                    f"alias {alias!r} -> {target!r} must map a new name to the name of a tensor"
                )
        if self.lora is not None:
            self.lora.check(self.shapes)


@lru_cache(_NUM_KEPT)
def _read_manifest(packed: bytes) -> Manifest:
    try:
        raw = msgpack.unpackb(packed)
    except Exception as error:  # msgpack's errors have no common class
        raise ProtocolError(f"undecodable manifest: {type(error).__name__}") from error
    fields = _typed(raw, dict, "manifest")
    tensors = _typed(fields.get("tensors"), list, "manifest tensors")
    aliases = _typed(fields.get("aliases"), dict, "manifest aliases")
    nbytes = _bounded(fields.get("nbytes"), MAX_IMAGE_NBYTES, "manifest nbytes")
    if len(tensors) > MAX_TENSORS or len(aliases) > MAX_TENSORS:
        raise ProtocolError(
            f"a manifest holds at most {MAX_TENSORS} tensors and as many aliases, "
            f"got {len(tensors)} and {len(aliases)}"
        )
    entries = tuple(_read_entry(tensor) for tensor in tensors)
    cursor = 0
    for entry in entries:
        if entry.offset % ALIGNMENT or entry.offset < cursor or entry.end > nbytes:
            raise ProtocolError(
                f"tensor {entry.name!r} at [{entry.offset}, {entry.end}) is misaligned, "
                f"overlaps byte {cursor} or leaves the image of {nbytes} bytes"
            )
        cursor = entry.end
    names = {_name(alias): _name(target) for alias, target in aliases.items()}
    raw_lora = fields.get("lora")
    lora = None if raw_lora is None else LoraSpec.from_wire(raw_lora)
    manifest = Manifest(entries=entries, aliases=names, nbytes=nbytes, lora=lora)
    try:
        manifest.check()
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    return manifest


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _read_entry(raw: object) -> TensorEntry:
    fields = _typed(raw, list, "tensor")
    if len(fields) != 4:
        raise ProtocolError(f"a tensor has 4 fields on the wire, got {len(fields)}")
    name, dtype, shape = _name(fields[0]), fields[1], _typed(fields[2], list, "shape")
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise ProtocolError(f"tensor {name!r} has unknown dtype {brief(dtype)}")
    if len(shape) > MAX_DIMS:
        raise ProtocolError(
            f"tensor {name!r} has {len(shape)} dims, at most {MAX_DIMS} are allowed"
        )
    sizes = tuple(_bounded(size, MAX_IMAGE_NBYTES, f"a size of {name!r}") for size in shape)
    nbytes = math.prod(sizes) * ITEMSIZES[dtype]
    offset = _bounded(fields[3], MAX_IMAGE_NBYTES, f"the offset of {name!r}")
    return TensorEntry(name=name, dtype=dtype, shape=sizes, offset=offset, nbytes=nbytes)


def _typed(raw: object, kind: type, what: str) -> Any:
    if not isinstance(raw, kind):
        raise ProtocolError(f"{what} must be a {kind.__name__}, got {type(raw).__name__}")
    return cast("Any", raw)


def _name(raw: object) -> str:
    if (
        not isinstance(raw, str)
        or not 0 < len(raw.encode(errors="surrogatepass")) <= MAX_NAME_NBYTES
    ):
        raise ProtocolError(f"a tensor name has 1 to {MAX_NAME_NBYTES} bytes, got {brief(raw)}")
    return raw


def _bounded(raw: object, limit: int, what: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= limit:
        raise ProtocolError(f"{what} must be an integer in [0, {limit}], got {brief(raw)}")
    return raw


def find_gap(manifest: Manifest, regions: Iterable[tuple[int, int, int | None]]) -> str:
    """The first byte that is missing, sent twice or outside; "" when there is none."""
    ordered = sorted((offset, nbytes) for offset, nbytes, _ in regions if nbytes)
    idx = 0
    for entry in manifest.entries:
        cursor = entry.offset
        while cursor < entry.end:
            if idx == len(ordered) or ordered[idx][0] != cursor:
                found = ordered[idx][0] if idx < len(ordered) else "nothing more"
                return (
                    f"the ranks' shards do not cover tensor {entry.name!r}: expected a region "
                    f"at image byte {cursor}, got {found}; do all ranks publish the same model?"
                )
            cursor += ordered[idx][1]
            idx += 1
        if cursor > entry.end:
            return f"a region reaches byte {cursor}, but tensor {entry.name!r} ends at {entry.end}"
    if idx != len(ordered):
        return f"a region at image byte {ordered[idx][0]} belongs to no tensor"
    return ""


@dataclass(frozen=True, slots=True)
class Extent:
    key: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """The part of an extent in one bucket.

    Attributes:
        key: the extent's.
        start: first byte within the extent.
        bucket_start: first byte within the bucket.
    """

    key: int
    start: int
    bucket_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketGrid:
    """The cuts of an image of `image_nbytes` into buckets: at least one, maybe an empty one.

    Bucket i is the window [i * bucket_nbytes, (i + 1) * bucket_nbytes); ranks and engines report
    progress in buckets. An extent is a byte range of the image that one process holds in one piece
    of its own memory: a whole parameter in an engine, a shard in a rank. A piece is the part of an
    extent that falls into one bucket.

        image    |--- w0 ---|.|---------------- w1 ----------------|...|- w2 -|
        buckets  [     0     ][     1     ][     2     ][     3     ][     4 ...
        pieces     w0:0  w1:0     w1:1         w1:2         w1:3      w2:4
    """

    image_nbytes: int
    bucket_nbytes: int

    def __post_init__(self) -> None:
        if self.bucket_nbytes <= 0 or self.bucket_nbytes % ALIGNMENT:
            raise ValueError(
                f"bucket_nbytes must be a positive multiple of {ALIGNMENT}, "
                f"got {self.bucket_nbytes}"
            )

    @property
    def num_buckets(self) -> int:
        return max(1, -(-self.image_nbytes // self.bucket_nbytes))

    @property
    def fits_pieces(self) -> bool:
        """Whether no bucket crosses the edge of a piece of the image."""
        return PIECE_NBYTES % self.bucket_nbytes == 0

    def window(self, idx: int) -> slice:
        start = idx * self.bucket_nbytes
        return slice(start, min(start + self.bucket_nbytes, self.image_nbytes))

    def num_reaching(self, end: int) -> int:
        """The number of first buckets that hold all image bytes before `end`."""
        return min(self.num_buckets, -(-end // self.bucket_nbytes))

    def cut(self, extents: Sequence[Extent]) -> list[list[BucketPiece]]:
        buckets: list[list[BucketPiece]] = [[] for _ in range(self.num_buckets)]
        for extent in extents:
            if extent.offset < 0 or extent.offset + extent.nbytes > self.image_nbytes:
                raise ValueError(f"{extent} exceeds the image of {self.image_nbytes} bytes")
            start = 0
            while start < extent.nbytes:
                idx, bucket_start = divmod(extent.offset + start, self.bucket_nbytes)
                nbytes = min(extent.nbytes - start, self.bucket_nbytes - bucket_start)
                buckets[idx].append(BucketPiece(extent.key, start, bucket_start, nbytes))
                start += nbytes
        return buckets
