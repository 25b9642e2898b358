"""The engine's end of a sync: buckets into parameters, and the proof that they arrived."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.weights.checksum import checksum_of
from umbra.runtime.weights.image import BucketGrid, Extent, Piece
from umbra.runtime.weights.manifest import Manifest, TensorEntry
from umbra.runtime.weights.memfd import BucketMappings
from umbra.runtime.weights.pages import populate_range
from umbra.runtime.weights.progress import EngineEnd
from umbra.runtime.weights.views import bucket_bytes, dtype_name, flatten

MAX_MISMATCHES: Final = 32
# Reported by name; a wrong layout would otherwise list every tensor of the model.
_ATTEST_THREADS: Final = 4
# A core sums faster than it reads from memory; beyond four little is gained.
_OPEN_TIMEOUT_S: Final = 10.0


class WeightReceiver:
    """Receives one version. Made at begin_update, dropped after commit or abort.

    Blocks; an engine calls it from the thread that owns its parameters. Owns neither these nor
    the mapping of the buckets.

    Args:
        manifest: the wire form that came with begin_update.
        buckets: {"fd_socket": path, "names": [...], "bucket_nbytes": int} from begin_update, with
            what `EngineEnd` wants.
        destinations: name -> parameter or buffer of this engine, any strides. Must be exactly the
            names of the manifest; of tied names any one, several sharing memory, or copies.
        mappings: the engine's; kept from one version to the next.

    Raises:
        WeightSyncError: names, shapes or dtypes disagree; nothing was touched.
    """

    def __init__(
        self,
        manifest: Manifest | Mapping[str, Any],
        buckets: Mapping[str, Any],
        destinations: Mapping[str, Tensor],
        mappings: BucketMappings,
        timeout_s: float = _OPEN_TIMEOUT_S,
    ) -> None:
        layout = manifest if isinstance(manifest, Manifest) else Manifest.from_wire(manifest)
        self._targets = [_Target(entry, group) for entry, group in _match(layout, destinations)]
        extents = [Extent(key, e.offset, e.nbytes) for key, e in enumerate(layout.entries)]
        self._plan = BucketGrid(layout.nbytes, buckets["bucket_nbytes"]).cut(extents)
        self._buckets = mappings.open(
            buckets["fd_socket"], buckets["names"], buckets["bucket_nbytes"], timeout_s
        )
        self._end = EngineEnd(buckets, timeout_s)

    def load(self) -> int:
        """Copies all buckets into the parameters as ranks fill them; the bytes copied. Once.

        Raises:
            WeightSyncError: the sync was given up; the parameters are half written.
        """
        memories = [bucket_bytes(bucket) for bucket in self._buckets]
        nbytes = 0
        with torch.no_grad():
            for idx in self._end.buckets(len(self._plan)):
                memory = memories[idx % len(memories)]
                for piece in self._plan[idx]:
                    self._targets[piece.key].write(piece, memory)
                    nbytes += piece.nbytes
        return nbytes

    def stop(self) -> None:
        """Ends a `load` that waits, from another thread."""
        self._end.stop()

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        """Checks every region [image offset, nbytes, checksum or None] in the parameters.

        Returns {"count": regions, "nbytes": their bytes, "mismatches": [text, ...]}; the text names
        tensor, byte range and both checksums.

        Raises:
            WeightSyncError: not every bucket was loaded.
            ProtocolError: a region is not inside one tensor.
        """
        self._end.check_all_loaded(len(self._plan))
        for target in self._targets:
            target.settle()
        nbytes = 0
        checks: list[tuple[_Target, int, int, int]] = []
        for target, start, region_nbytes, checksum in self._locate(regions):
            nbytes += region_nbytes
            if checksum is not None:
                checks.append((target, start, region_nbytes, checksum))
        mismatches = _verify(checks)
        return {"count": len(regions), "nbytes": nbytes, "mismatches": mismatches}

    def _locate(
        self, regions: Sequence[Sequence[int | None]]
    ) -> Iterator[tuple[_Target, int, int, int | None]]:
        targets = [target for target in self._targets if target.entry.nbytes]
        offsets = [target.entry.offset for target in targets]
        for offset, nbytes, checksum in regions:
            if offset is None or nbytes is None:
                raise ProtocolError("a region needs an offset and a length")
            idx = bisect.bisect_right(offsets, offset) - 1
            if idx < 0 or nbytes < 0 or offset + nbytes > targets[idx].entry.end:
                raise ProtocolError(f"region [{offset}, {offset + nbytes}) is not in one tensor")
            yield targets[idx], offset - offsets[idx], nbytes, checksum


class _Target:
    """The parameters that one manifest entry goes to; more than one for unshared tied names."""

    def __init__(self, entry: TensorEntry, tensors: list[Tensor]) -> None:
        self.entry = entry
        self._tensors = tensors
        self._staged = [tensor for tensor in tensors if not tensor.is_contiguous()]
        self._bytes = [_as_bytes(tensor) for tensor in tensors if tensor.is_contiguous()]
        if self._staged:
            # Strided parameters are assembled here first, in row-major order.
            staging = torch.empty(
                entry.shape, dtype=self._staged[0].dtype, device=self._staged[0].device
            )
            self._staging = staging
            self._bytes.append(_as_bytes(staging))

    def write(self, piece: Piece, memory: Tensor) -> None:
        source = memory[piece.bucket_start : piece.bucket_start + piece.nbytes]
        for data in self._bytes:
            data[piece.start : piece.start + piece.nbytes].copy_(source)

    def settle(self) -> None:
        with torch.no_grad():
            for tensor in self._staged:
                tensor.copy_(self._staging)

    def check(self, start: int, nbytes: int, checksum: int) -> str | None:
        """None, or what is wrong with bytes [start, start + nbytes) of the parameters."""
        for tensor in self._tensors:
            found = checksum_of(_as_bytes(tensor.contiguous())[start : start + nbytes])
            if found != checksum:
                return (
                    f"{self.entry.name} bytes [{start}, {start + nbytes}): "
                    f"sent {checksum:#018x}, arrived {found:#018x}"
                )
        return None


def populate(tensors: Iterable[Tensor]) -> None:
    """Makes the memory of fresh CPU tensors present, in huge pages where the system allows.

    An engine calls this when it allocates parameters (start, wake). Without it the first sync
    pays for the page faults: 25 times the time of a copy on a virtual machine. Contents are kept.
    """
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_cuda
    }
    for storage in storages.values():
        populate_range(storage.data_ptr(), storage.nbytes())


def _match(
    manifest: Manifest, destinations: Mapping[str, Tensor]
) -> Iterator[tuple[TensorEntry, list[Tensor]]]:
    names: dict[str, list[str]] = {entry.name: [entry.name] for entry in manifest.entries}
    for alias, target in manifest.aliases.items():
        names[target].append(alias)
    unknown = set(destinations).difference(*names.values())
    missing = [name for name, tied in names.items() if not destinations.keys() & set(tied)]
    if unknown or missing:
        raise WeightSyncError(
            f"the trainer sends {len(names)} tensors, the engine has {len(destinations)}: "
            f"not in the engine {_some(missing)}, not sent {_some(unknown)}"
        )
    for entry in manifest.entries:
        group: dict[int, Tensor] = {}
        for name in names[entry.name]:
            tensor = destinations.get(name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise WeightSyncError(
                    f"tensor {name!r}: the trainer sends {entry.dtype} {list(entry.shape)}, the "
                    f"engine has {dtype_name(tensor.dtype)} {list(tensor.shape)}"
                )
            group.setdefault(tensor.data_ptr() if tensor.numel() else 0, tensor)
        yield entry, list(group.values())


def _verify(checks: list[tuple[_Target, int, int, int]]) -> list[str]:
    """The mismatches, found by a few threads (the sums run without the interpreter lock)."""
    num_threads = max(1, min(_ATTEST_THREADS, os.cpu_count() or 1, len(checks)))

    def check_every_nth(first: int) -> list[tuple[int, str]]:
        wrong: list[tuple[int, str]] = []
        for idx in range(first, len(checks), num_threads):
            target, start, nbytes, checksum = checks[idx]
            text = target.check(start, nbytes, checksum)
            if text is not None:
                wrong.append((idx, text))
        return wrong

    with ThreadPoolExecutor(num_threads, thread_name_prefix="attest") as pool:
        by_thread = list(pool.map(check_every_nth, range(num_threads)))
    found = [text for _, text in sorted(wrong for part in by_thread for wrong in part)]
    if len(found) > MAX_MISMATCHES:
        return [*found[:MAX_MISMATCHES], f"and {len(found) - MAX_MISMATCHES} more"]
    return found


def _as_bytes(tensor: Tensor) -> Tensor:
    return flatten(tensor).view(torch.uint8)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5]) or "none"
    return shown if len(ordered) <= 5 else f"{shown} and {len(ordered) - 5} more"
