"""The source of an update's weights in an engine's worker process: tensors, or blocks of them.

A description is a plain map. The engine's process makes it, and the engine's own channels carry it
to the workers:

    image     path, nbytes, manifest, fd_socket, progress, paths      weight_image
    exports   exports, manifest, fd_socket, progress, has_checksums   weight_import

Both notice that the sync was aborted: between tensors, and before and after the copies of a plan.
An image that came without a sync has neither fd_socket nor progress. The paths are those of the
image on each node of an engine on several; the first one is `path`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import accumulate
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from umbra.engines.shell.weight_image import image_tensors
from umbra.runtime.weights.checksums.checksum import CastValues, sum_all, to_checksums
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.byte_views import flatten
from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage
from umbra.runtime.weights.transports.cuda_ipc.opened_memory import OpenedMemory
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

_OPEN_TIMEOUT_S: Final = 10.0

Regions = list[list[int | None]]
"""[image offset, nbytes, checksum or None] of each region."""


class WeightSource(Protocol):
    """The weights of one update."""

    manifest: Manifest

    @property
    def memory(self) -> object | None:
        """The same object as in an earlier update if every block is where it was then, so that
        views of blocks may be used again. None: they are lost at the end of the update."""
        ...

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

    def reading(self) -> AbstractContextManager[None]:
        """A context in which blocks are read: the ranks have all of them, and at its end they count
        as loaded. Errors as in `tensors`, at its beginning and end."""
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
    memory: OpenedMemory | None = None,
) -> Generator[WeightSource]:
    """Opens the described source; it is closed at the end of the block. The first of the engine's
    workers reports the engine's progress.

    Args:
        device: of the tensors, unless they come from an image.
        memory: what the worker has open of the ranks' memory. Without it, nothing stays open.

    Raises:
        WeightSyncError, ProtocolError: it disagrees with the manifest, or cannot be read.
    """
    if "exports" not in description and memory is not None:
        memory.close()
    description, rank = _on_this_node(description), _worker_rank()
    if "progress" not in description:
        yield _ImageSource(description, None)
        return
    with closing(EngineEnd(description, _OPEN_TIMEOUT_S, counts=rank == 0)) as end:
        if "exports" not in description:
            yield _ImageSource(description, end)
            return
        opened = memory or OpenedMemory()
        try:
            image = opened.image(description["manifest"], description["exports"])
            yield _ExportSource(
                image, end, device, has_checksums=bool(description["has_checksums"])
            )
        finally:
            opened.leave() if memory is not None else opened.close()


def _on_this_node(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where this worker finds an update, of which a follower has a copy on its own node."""
    paths: Sequence[str] = description.get("paths", ())
    if not paths:
        return description
    part = _worker_rank() * len(paths) // torch.distributed.get_world_size()
    if part == 0:
        return description
    # Without the progress, which is in memory of the leading part's node.
    return {name: description[name] for name in ("manifest", "nbytes")} | {"path": paths[part]}


def _worker_rank() -> int:
    """The index of this worker among the engine's; each has as many on each of its nodes."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class _ImageSource:
    memory = None

    def __init__(self, description: Mapping[str, Any], end: EngineEnd | None) -> None:
        self.manifest = Manifest.from_wire(description["manifest"])
        self.regions: Regions = []  # the engine's process verifies the image
        self._description = description
        self._end = end
        self._tensors: dict[str, Tensor] = {}

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        wanted, tensors = _named(self.manifest, names), self._map()
        for idx, entry in enumerate(self.manifest.entries):
            self._check_not_aborted()
            for name in wanted[idx]:
                yield name, tensors[entry.name]

    @contextmanager
    def reading(self) -> Generator[None]:
        self._check_not_aborted()
        yield
        self._check_not_aborted()

    def blocks(self, idx: int) -> list[ShardBlock]:
        shape = self.manifest.entries[idx].shape
        return [ShardBlock(tuple(0 for _ in shape), shape)]

    def block(self, idx: int, number: int) -> Tensor:
        return self.whole(idx)

    def whole(self, idx: int) -> Tensor:
        self._tensors = self._tensors or self._map()
        return self._tensors[self.manifest.entries[idx].name]

    def _check_not_aborted(self) -> None:
        if self._end is not None:
            self._end.check_not_aborted()

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
        self._image = image
        self._end = end
        self._num_entries = len(image.manifest.entries)
        self._device = device
        counts = [len(image.regions(idx)) for idx in range(self._num_entries)]
        self._first_regions = [0, *accumulate(counts)]  # by entry
        self._has_checksums = has_checksums
        self._summed: set[int] = set()  # entries
        self._sums = torch.zeros(sum(counts), dtype=torch.int64, device=device)

    @property
    def memory(self) -> ExportedImage:
        return self._image

    @property
    def regions(self) -> Regions:
        """With checksums, if there are any: of what parameters got by copies, or else of what was
        read."""
        found = [region for idx in range(self._num_entries) for region in self._image.regions(idx)]
        checksums = to_checksums(self._sums) if self._has_checksums else [None] * len(found)
        return [[*region, each] for region, each in zip(found, checksums, strict=True)]

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Reports the progress of each entry the first time that it is taken."""
        wanted = _named(self.manifest, names)
        for idx in range(self._num_entries):
            self._end.check_not_aborted()
            self._end.wait_filled(idx + 1)
            if wanted[idx]:
                tensor = self.whole(idx)
                for name in wanted[idx]:
                    yield name, tensor
            if self._end.num_loaded == idx:
                self._end.set_loaded(idx + 1)

    @contextmanager
    def reading(self) -> Generator[None]:
        self._end.wait_filled(self._num_entries)
        yield
        if self._has_checksums:
            self._sum_parts()
        self._end.check_not_aborted()
        self._end.set_loaded(self._num_entries)

    def blocks(self, idx: int) -> list[ShardBlock]:
        return self._image.blocks(idx)

    def block(self, idx: int, number: int) -> Tensor:
        return self._image.part(idx, number)

    def whole(self, idx: int) -> Tensor:
        tensor = self._image.assemble(idx, self._device)
        if self._has_checksums and idx not in self._summed:
            start, data = self.manifest.entries[idx].offset, flatten(tensor).view(torch.uint8)
            regions = self._image.regions(idx)
            parts = [data[offset - start : offset - start + nbytes] for offset, nbytes in regions]
            self._note_sums([idx], [CastValues(part, torch.uint8) for part in parts])
        return tensor

    def _sum_parts(self) -> None:
        """Of the entries that were not read whole: as each rank holds its part, in the dtype in
        which it travels."""
        missing = [idx for idx in range(self._num_entries) if idx not in self._summed]
        parts = [
            CastValues(self._image.part(idx, number), self._dtype_on_wire(idx))
            for idx in missing
            for number in range(len(self._image.regions(idx)))
        ]
        self._note_sums(missing, parts)

    @torch.inference_mode()
    def _note_sums(self, indices: Sequence[int], parts: Sequence[CastValues]) -> None:
        """Takes the checksums of all regions of these entries, without waiting for the GPU."""
        self._summed.update(indices)
        if parts:
            first = self._first_regions
            regions = [n for idx in indices for n in range(first[idx], first[idx + 1])]
            self._sums[torch.tensor(regions, device=self._device)] = sum_all(parts)

    def _dtype_on_wire(self, idx: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.manifest.entries[idx].dtype)
        return dtype


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
