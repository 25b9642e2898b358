from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.process.host_memory import populate_range
from umbra.runtime.weights.checksum import CastValues, checksums_of
from umbra.runtime.weights.manifest import (
    BucketGrid,
    Extent,
    Manifest,
    TensorEntry,
)
from umbra.runtime.weights.shards import dtype_name, flatten

MAX_MISMATCHES: Final = 32
# Names in an error; a wrong layout would otherwise list every tensor of the model.
_VERIFY_THREADS: Final = 4
# A core sums faster than it reads from memory; more than four threads gain little.


class Destinations:
    """The parameters of an engine, matched with a manifest, and the bytes of each bucket for them.
    It holds tensors, never their addresses, because they may move between updates. One thread at a
    time. Raises WeightSyncError if names, shapes or dtypes disagree."""

    def __init__(
        self, manifest: Manifest, parameters: Mapping[str, Tensor], bucket_nbytes: int
    ) -> None:
        self._targets = [_Target(entry, group) for entry, group in _match(manifest, parameters)]
        extents = [Extent(key, e.offset, e.nbytes) for key, e in enumerate(manifest.entries)]
        self._plan = BucketGrid(manifest.nbytes, bucket_nbytes).cut(extents)
        self._payloads = [target for target in self._targets if target.entry.nbytes]
        self._offsets = [target.entry.offset for target in self._payloads]

    @property
    def num_buckets(self) -> int:
        return len(self._plan)

    def write(self, idx: int, memory: Tensor, *, waits: bool = True) -> int:
        """Copies bucket `idx` from `memory`, uint8 [bucket_nbytes]; returns the bytes copied. With
        `waits`, copies to a GPU are done."""
        nbytes = 0
        for piece in self._plan[idx]:
            target = self._targets[piece.key]
            data = memory[piece.bucket_start : piece.bucket_start + piece.nbytes]
            values = data.view(target.dtype)
            nbytes += target.write(piece.start // values.itemsize, values, waits=waits)
        return nbytes

    def write_values(self, key: int, start: int, values: Tensor) -> int:
        """Copies `values` [elements], of any device and dtype, to the entry's elements from `start`
        on; returns the bytes written."""
        return self._targets[key].write(start, values)

    def settle(self) -> None:
        """Gives strided parameters their values, after the last write."""
        for target in self._targets:
            target.settle()

    def drop_staging(self) -> None:
        """Frees memory that only an update needs."""
        for target in self._targets:
            target.drop_staging()

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        """Compares regions [image offset, nbytes, checksum or None] with the parameters;
        returns a text for each difference. Raises ProtocolError for a region that is not
        inside one tensor."""
        checks: list[_Check] = []
        contents: dict[_Target, list[Tensor]] = {}
        for target, start, region_nbytes, checksum in self._locate(regions):
            if checksum is None:
                continue
            if target not in contents:
                contents[target] = target.contents()
            where = f"{target.entry.name} bytes [{start}, {start + region_nbytes})"
            for data in contents[target]:
                checks.append(_Check(where, data[start : start + region_nbytes], checksum))
        return _mismatches(checks)

    def _locate(
        self, regions: Sequence[Sequence[int | None]]
    ) -> Iterator[tuple[_Target, int, int, int | None]]:
        targets, offsets = self._payloads, self._offsets
        for offset, nbytes, checksum in regions:
            if offset is None or nbytes is None:
                raise ProtocolError("a region needs an offset and a length")
            idx = bisect.bisect_right(offsets, offset) - 1
            if idx < 0 or nbytes < 0 or offset + nbytes > targets[idx].entry.end:
                raise ProtocolError(f"region [{offset}, {offset + nbytes}) is not in one tensor")
            yield targets[idx], offset - offsets[idx], nbytes, checksum


class _Check(NamedTuple):
    where: str
    data: Tensor
    checksum: int


class _Target:
    """The parameters of one manifest entry; several if tied names do not share memory."""

    def __init__(self, entry: TensorEntry, tensors: list[Tensor]) -> None:
        self.entry = entry
        self._tensors = tensors
        self.dtype = tensors[0].dtype
        self._flat = [flatten(tensor) for tensor in tensors if tensor.is_contiguous()]
        self._strided = [tensor for tensor in tensors if not tensor.is_contiguous()]
        self._staging: Tensor | None = None

    def write(self, start: int, values: Tensor, *, waits: bool = True) -> int:
        """Copies elements from `start` on; returns their bytes in the parameter."""
        stop = start + values.numel()
        staged = [flatten(self._stage())] if self._strided else []
        for elements in (*self._flat, *staged):
            elements[start:stop].copy_(values, non_blocking=not waits)
        return values.numel() * self.dtype.itemsize

    def settle(self) -> None:
        with torch.no_grad():
            for tensor in self._strided:
                tensor.copy_(self._stage())

    def drop_staging(self) -> None:
        self._staging = None

    def contents(self) -> list[Tensor]:
        """The bytes of each parameter: uint8 [entry.nbytes]. Copies of strided ones."""
        return [_as_bytes(tensor.contiguous()) for tensor in self._tensors]

    def _stage(self) -> Tensor:
        """Memory in which strided parameters are first assembled in row-major order."""
        if self._staging is None:
            like = self._strided[0]
            self._staging = torch.empty(self.entry.shape, dtype=like.dtype, device=like.device)
        return self._staging


def populate(tensors: Iterable[Tensor]) -> None:
    """Makes the memory of new CPU tensors present, in huge pages if the system allows; contents
    stay. An engine calls this when it allocates parameters. Otherwise the first sync pays for the
    page faults: 25 times the time of a copy on a virtual machine."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_cuda
    }
    for storage in storages.values():
        populate_range(storage.data_ptr(), storage.nbytes())


def _match(
    manifest: Manifest, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[TensorEntry, list[Tensor]]]:
    names: dict[str, list[str]] = {entry.name: [entry.name] for entry in manifest.entries}
    for alias, target in manifest.aliases.items():
        names[target].append(alias)
    unknown = set(parameters).difference(*names.values())
    missing = [name for name, tied in names.items() if not parameters.keys() & set(tied)]
    if unknown or missing:
        raise WeightSyncError(
            f"the trainer sends {len(names)} tensors, the engine has {len(parameters)}: "
            f"not in the engine {_some(missing)}, not sent {_some(unknown)}"
        )
    for entry in manifest.entries:
        group: dict[int, Tensor] = {}
        for name in names[entry.name]:
            tensor = parameters.get(name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise WeightSyncError(
                    f"tensor {name!r}: the trainer sends {entry.dtype} {list(entry.shape)}, the "
                    f"engine has {dtype_name(tensor.dtype)} {list(tensor.shape)}"
                )
            group.setdefault(tensor.data_ptr() if tensor.numel() else 0, tensor)
        yield entry, list(group.values())


def _mismatches(checks: Sequence[_Check]) -> list[str]:
    data = [CastValues(check.data, torch.uint8) for check in checks]
    wrong = [
        f"{check.where}: sent {check.checksum:#018x}, arrived {found:#018x}"
        for check, found in zip(checks, checksums_of(data, _VERIFY_THREADS), strict=True)
        if found != check.checksum
    ]
    if len(wrong) > MAX_MISMATCHES:
        return [*wrong[:MAX_MISMATCHES], f"and {len(wrong) - MAX_MISMATCHES} more"]
    return wrong


def _as_bytes(tensor: Tensor) -> Tensor:
    return flatten(tensor).view(torch.uint8)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5]) or "none"
    return shown if len(ordered) <= 5 else f"{shown} and {len(ordered) - 5} more"
