"""The source of an update's weights in an engine's worker process: tensors, or blocks of them.

A description is a plain map. The engine's process makes it, and the engine's own channels carry it
to the workers:

    image     path, nbytes, manifest, fd_socket, progress             weight_image
    exports   exports, manifest, fd_socket, progress, has_checksums   weight_import

Both notice while they load that the sync was aborted. An image that came without a sync has neither
fd_socket nor progress.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from umbra.engines.shell.weight_image import image_tensors
from umbra.runtime.weights.checksum import checksum_of
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.byte_views import flatten
from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage, MakeOpener
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

_OPEN_TIMEOUT_S: Final = 10.0

Regions = list[list[int | None]]
"""[image offset, nbytes, checksum or None] of each region."""


class WeightSource(Protocol):
    """The weights of one update."""

    manifest: Manifest

    @property
    def regions(self) -> Regions:
        """What was read and must be verified, once everything was taken."""
        ...

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields names with their tensors, all or some; a tied tensor comes under each of its names
        in a row.

        A tensor is valid as long as the source is open, and longer if it came from a GPU.

        Raises:
            WeightSyncError: the ranks' memory cannot be read, or the sync was aborted.
        """
        ...

    def entries(self) -> Iterator[int]:
        """Yields the index of each entry of the manifest once the ranks have it, and reports
        progress. For an update that reads blocks; errors as in `tensors`."""
        ...

    def blocks(self, idx: int) -> list[ShardBlock]:
        """The blocks of an entry; empty if there are none that a copy can be split by."""
        ...

    def block(self, idx: int, number: int) -> Tensor:
        """One of them, in the dtype and with the strides that its holder has. Not to be written
        to."""
        ...

    def whole(self, idx: int) -> Tensor:
        """An entry in one piece, contiguous, in the dtype of the manifest."""
        ...


@contextmanager
def open_weights(
    description: Mapping[str, Any],
    device: torch.device,
    *,
    counts: bool = True,
    make_opener: MakeOpener = CudaOpener,
) -> Generator[WeightSource]:
    """Opens the described source; it is closed at the end of the block.

    Args:
        device: of the tensors, unless they come from an image.
        counts: whether this worker reports the engine's progress; one worker does.

    Raises:
        WeightSyncError, ProtocolError: it disagrees with the manifest, or cannot be read.
    """
    manifest = Manifest.from_wire(description["manifest"])
    if "progress" not in description:
        yield _ImageSource(manifest, description, None)
        return
    with closing(EngineEnd(description, _OPEN_TIMEOUT_S, counts=counts)) as end:
        if "exports" not in description:
            yield _ImageSource(manifest, description, end)
            return
        with closing(ExportedImage(manifest, description["exports"], make_opener)) as image:
            yield _ExportSource(
                image, end, device, has_checksums=bool(description["has_checksums"])
            )


class _ImageSource:
    def __init__(
        self, manifest: Manifest, description: Mapping[str, Any], end: EngineEnd | None
    ) -> None:
        self.manifest = manifest
        self.regions: Regions = []  # the engine's process verifies the image
        self._description = description
        self._end = end
        self._tensors: dict[str, Tensor] = {}

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        wanted, tensors = _named(self.manifest, names), self._map()
        for idx in self.entries():
            for name in wanted[idx]:
                yield name, tensors[self.manifest.entries[idx].name]

    def entries(self) -> Iterator[int]:
        for idx in range(len(self.manifest.entries)):
            if self._end is not None:
                self._end.check_not_aborted()
            yield idx

    def blocks(self, idx: int) -> list[ShardBlock]:
        shape = self.manifest.entries[idx].shape
        return [ShardBlock(tuple(0 for _ in shape), shape)]

    def block(self, idx: int, number: int) -> Tensor:
        return self.whole(idx)

    def whole(self, idx: int) -> Tensor:
        self._tensors = self._tensors or self._map()
        return self._tensors[self.manifest.entries[idx].name]

    def _map(self) -> dict[str, Tensor]:
        """A mapping of its own: a loader may write to its tensors, but others read the image."""
        fd = os.open(self._description["path"], os.O_RDONLY)
        try:
            nbytes = self._description["nbytes"]
            memory = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        return image_tensors(self.manifest, memory)


class _ExportSource:
    def __init__(
        self, image: ExportedImage, end: EngineEnd, device: torch.device, *, has_checksums: bool
    ) -> None:
        self.manifest = image.manifest
        self._regions: dict[int, Regions] = {}  # by entry
        self._image = image
        self._end = end
        self._buckets = end.buckets(len(image.manifest.entries))
        self._num_taken = 0
        self._device = device
        self._has_checksums = has_checksums

    @property
    def regions(self) -> Regions:
        return [region for regions in self._regions.values() for region in regions]

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        wanted = _named(self.manifest, names)
        for idx in self._in_order():
            if wanted[idx]:
                tensor = self.whole(idx)
                for name in wanted[idx]:
                    yield name, tensor

    def entries(self) -> Iterator[int]:
        for idx in self._in_order():
            if idx not in self._regions:
                self._note(idx, None)
            yield idx

    def blocks(self, idx: int) -> list[ShardBlock]:
        return self._image.blocks(idx)

    def block(self, idx: int, number: int) -> Tensor:
        return self._image.part(idx, number)

    def whole(self, idx: int) -> Tensor:
        tensor = self._image.assemble(idx, self._device)
        if idx not in self._regions:
            self._note(idx, tensor)
        return tensor

    def _in_order(self) -> Iterator[int]:
        """Reports the progress of each entry the first time that it is taken."""
        for idx in range(len(self.manifest.entries)):
            if idx < self._num_taken:
                self._end.check_not_aborted()
            else:
                next(self._buckets)
                self._num_taken += 1
            yield idx
        next(self._buckets, None)  # the last one is loaded, too

    def _note(self, idx: int, whole: Tensor | None) -> None:
        """Notes the regions of an entry; checksums are of the assembled tensor, or of each part as
        its rank holds it, in the dtype in which it travels."""
        entry = self.manifest.entries[idx]
        self._regions[idx] = []
        for number, (offset, nbytes) in enumerate(self._image.regions(idx)):
            checksum = None
            if self._has_checksums:
                start = offset - entry.offset
                if whole is not None:
                    data = flatten(whole).view(torch.uint8)[start : start + nbytes]
                else:
                    part = self._image.part(idx, number).to(getattr(torch, entry.dtype))
                    data = flatten(part.contiguous()).view(torch.uint8)
                checksum = checksum_of(data)
            self._regions[idx].append([offset, nbytes, checksum])


def _named(manifest: Manifest, names: Collection[str] | None) -> list[list[str]]:
    """The wanted names of each entry."""
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    return [
        [
            name
            for name in (entry.name, *aliases.get(entry.name, ()))
            if names is None or name in names
        ]
        for entry in manifest.entries
    ]
