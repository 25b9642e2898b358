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
from typing import Any, Final, NamedTuple, Protocol

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


class BlockCopy(NamedTuple):
    """A copy from a view of a block, or all of it, to a view of a parameter.

    Attributes:
        idx: of the block's entry.
        number: of the block among those of the entry.
        values: in the dtype that the block's holder has.
        on_wire: the dtype to which values are cast before they get that of the target, as they
            would be on their way to the loader; None if that makes no difference.
    """

    idx: int
    number: int
    values: Tensor
    target: Tensor
    on_wire: torch.dtype | None

    def carry_out(self) -> None:
        self.target.copy_(self._cast_values())

    def expected(self) -> CastValues:
        """What the target has afterwards."""
        return CastValues(self._cast_values(), self.target.dtype)

    def _cast_values(self) -> Tensor:
        return self.values if self.on_wire is None else self.values.to(self.on_wire)


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

    def reading(self, copies: Sequence[BlockCopy]) -> AbstractContextManager[None]:
        """A context in which these copies are carried out: the ranks have all blocks, and at its
        end they count as loaded. Errors as in `tensors`, at its beginning and end."""
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
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
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
        """With checksums, if there are any: of what parameters got by copies of blocks, and else of
        what was read."""
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
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
        self._end.wait_filled(self._num_entries)
        yield
        if self._has_checksums:
            self._sum_kept(copies)
        self._end.check_not_aborted()
        self._end.set_loaded(self._num_entries)

    def blocks(self, idx: int) -> list[ShardBlock]:
        return self._image.blocks(idx)

    def block(self, idx: int, number: int) -> Tensor:
        return self._image.part(idx, number)

    def whole(self, idx: int) -> Tensor:
        tensor = self._image.assemble(idx, self._device)
        if self._has_checksums and idx not in self._summed:
            self._summed.add(idx)
            start, data = self.manifest.entries[idx].offset, flatten(tensor).view(torch.uint8)
            self._add_up(
                [
                    _Term(region, CastValues(data[offset - start :][:nbytes], torch.uint8))
                    for region, (offset, nbytes) in enumerate(
                        self._image.regions(idx), self._first_regions[idx]
                    )
                ]
            )
        return tensor

    def _sum_kept(self, copies: Sequence[BlockCopy]) -> None:
        """Takes the checksum of each region from the parameter that got all of it in one copy.

        Of other regions it takes what the rank has, and adds by how much the parameters that got a
        part of it differ from that part: nothing, if all is well.
        """
        by_block: dict[tuple[int, int], list[BlockCopy]] = {}
        for copy in copies:
            by_block.setdefault((copy.idx, copy.number), []).append(copy)
        terms: list[_Term] = []
        for idx, first in enumerate(self._first_regions[:-1]):
            on_wire = self._dtype_on_wire(idx)
            for number in range(len(self._image.regions(idx))):
                region, made = first + number, by_block.get((idx, number), [])
                if idx not in self._summed:
                    part = self._image.part(idx, number)
                    whole = next((copy for copy in made if _is_whole(copy, part, on_wire)), None)
                    kept = part if whole is None else whole.target
                    terms.append(_Term(region, CastValues(kept, on_wire)))
                    made = [copy for copy in made if copy is not whole]
                for copy in made:
                    terms.append(_Term(region, CastValues(copy.target, copy.target.dtype)))
                    terms.append(_Term(region, copy.expected(), sign=-1))
        self._summed.update(range(self._num_entries))
        self._add_up(terms)

    @torch.inference_mode()
    def _add_up(self, terms: Sequence[_Term]) -> None:
        """Adds the checksums to those of their regions, without waiting for the GPU."""
        if terms:
            sums = sum_all([term.content for term in terms])
            signs = torch.tensor([term.sign for term in terms], device=sums.device)
            regions = torch.tensor([term.region for term in terms], device=sums.device)
            self._sums.index_add_(0, regions, sums * signs)

    def _dtype_on_wire(self, idx: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.manifest.entries[idx].dtype)
        return dtype


class _Term(NamedTuple):
    """A checksum that is added to that of a region, or subtracted."""

    region: int
    content: CastValues
    sign: int = 1


def _is_whole(copy: BlockCopy, part: Tensor, on_wire: torch.dtype) -> bool:
    """Whether the target has the bytes of a rank's whole part, in the order in which they
    travel."""
    return (
        copy.target.dtype == on_wire
        and copy.values.numel() == part.numel()
        and copy.values.is_contiguous()
        and part.is_contiguous()
    )


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
