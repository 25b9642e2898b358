"""The source of an update's weights in an engine's worker process, one tensor at a time.

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
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from umbra.engines.shell.weight_image import image_tensors
from umbra.runtime.weights.checksum import checksum_of
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.byte_views import flatten
from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage, MakeOpener
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

_OPEN_TIMEOUT_S: Final = 10.0

Regions = list[list[int | None]]
"""[image offset, nbytes, checksum or None] of each region."""


class WeightSource(Protocol):
    """The weights of one update.

    Attributes:
        regions: what was read and must be verified, once everything was taken.
    """

    regions: Regions

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every name with its tensor, once; a tied tensor comes under each name in a row.

        A tensor is valid as long as the source is open, and longer if it came from a GPU.

        Raises:
            WeightSyncError: the ranks' memory cannot be read, or the sync was aborted.
        """
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
        self.regions: Regions = []
        self._manifest = manifest
        self._end = end
        fd = os.open(description["path"], os.O_RDONLY)
        try:  # private: a loader may write to its tensors, but the image must still be verified
            self._memory = mmap.mmap(fd, description["nbytes"], access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        aliases = _aliases(self._manifest)
        for name, tensor in image_tensors(self._manifest, self._memory).items():
            if self._end is not None:
                self._end.check_not_aborted()
            for each in (name, *aliases.get(name, ())):
                yield each, tensor


class _ExportSource:
    def __init__(
        self, image: ExportedImage, end: EngineEnd, device: torch.device, *, has_checksums: bool
    ) -> None:
        self.regions: Regions = []
        self._image = image
        self._end = end
        self._device = device
        self._has_checksums = has_checksums
        self._aliases = _aliases(image.manifest)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        entries = self._image.manifest.entries
        for idx in self._end.buckets(len(entries)):
            tensor = self._image.assemble(idx, self._device)
            self._note(idx, tensor)
            for name in (entries[idx].name, *self._aliases.get(entries[idx].name, ())):
                yield name, tensor

    def _note(self, idx: int, tensor: Tensor) -> None:
        data = flatten(tensor).view(torch.uint8)
        start = self._image.manifest.entries[idx].offset
        for offset, nbytes in self._image.regions(idx):
            part = data[offset - start : offset - start + nbytes]
            checksum = checksum_of(part) if self._has_checksums else None
            self.regions.append([offset, nbytes, checksum])


def _aliases(manifest: Manifest) -> dict[str, list[str]]:
    """The other names of each tensor that has some."""
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    return aliases
