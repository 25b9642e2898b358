"""The source of an update's weights in an engine's worker process: tensors, or blocks of them.

A description is a plain map. The engine's process makes it, and the engine's own channels carry it
to the workers:

    image     image, bucket_nbytes, manifest, fd_socket, progress     image_import
    exports   exports, manifest, fd_socket, progress, has_checksums   weight_import
    copy      path, nbytes, manifest                                  an image without a sync

The first two notice that the sync was aborted: between tensors, and before and after the copies of
a plan. An engine on several nodes adds to that of an image its nbytes, and the paths of the copies
on its nodes; the first one is not used.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.engines.shell.image_import import image_tensors
from umbra.runtime.weights.checksums.checksum import CastValues, sum_all, to_checksums
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.byte_views import flatten
from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener
from umbra.runtime.weights.transports.cuda_ipc.opened_memory import MakeOpener, OpenedMemory
from umbra.runtime.weights.transports.shared_memory.bucket_grid import BucketGrid
from umbra.runtime.weights.transports.shared_memory.gpu_copies import GpuCopies, cut_at_pieces
from umbra.runtime.weights.transports.shared_memory.mapped_image import KeptImage, MappedImage
from umbra.runtime.weights.transports.shared_memory.memfd import received_fd
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
        """A copy from the host to a GPU may still be in progress afterwards."""
        self.target.copy_(self._cast_values(), non_blocking=True)

    def parts(self) -> list[BlockCopy]:
        """The same in copies that a GPU can make of locked pages; see `cut_at_pieces`."""
        if not (self.values.is_cpu and self.target.is_cuda):
            return [self]
        return [
            self._replace(values=values, target=target)
            for values, target in cut_at_pieces(self.values, self.target)
        ]

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
        """The same object as in an earlier update if every block is where it was then: views of
        blocks may be used again as long as it exists. None: they are lost at the end of the
        update."""
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
        """A context in which these copies are carried out; at its end the blocks count as loaded.
        Errors as in `tensors`."""
        ...

    def wait(self, idx: int) -> None:
        """Within `reading`: returns when the blocks of an entry may be read, which is sooner for
        earlier entries. Errors as in `tensors`."""
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


class WorkerMemory:
    """What a worker keeps open from one update to the next: the ranks' memory, or the image of its
    node."""

    def __init__(self, make_opener: MakeOpener = CudaOpener) -> None:
        self.exports = OpenedMemory(make_opener)
        self.image = KeptImage()

    def close(self) -> None:
        """Idempotent."""
        self.exports.close()
        self.image.close()


@contextmanager
def open_weights(
    description: Mapping[str, Any],
    device: torch.device,
    *,
    memory: WorkerMemory | None = None,
) -> Generator[WeightSource]:
    """Opens the described source; it is closed at the end of the block. The first of the engine's
    workers reports the engine's progress.

    Args:
        device: of the tensors, unless they come from an image.
        memory: what the worker keeps open. Without it, nothing stays open.

    Raises:
        WeightSyncError, ProtocolError: it disagrees with the manifest, or cannot be read.
    """
    description = _on_this_node(description)
    if "progress" not in description:
        yield _ImageCopy(description)
        return
    opened = memory or WorkerMemory()
    try:
        with closing(EngineEnd(description, _OPEN_TIMEOUT_S, counts=_worker_rank() == 0)) as end:
            if "exports" in description:
                opened.image.close()
                yield from _open_exports(description, opened.exports, end, device)
            else:
                opened.exports.close()
                source = _ImageSource(description, opened.image, end, device)
                try:
                    yield source
                    source.finish()
                finally:
                    source.settle()
    finally:
        if memory is None:
            opened.close()


def _open_exports(
    description: Mapping[str, Any], opened: OpenedMemory, end: EngineEnd, device: torch.device
) -> Iterator[WeightSource]:
    try:
        image = opened.image(description["manifest"], description["exports"])
        yield _ExportSource(image, end, device, has_checksums=bool(description["has_checksums"]))
    finally:
        opened.leave()


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


def filled_image(description: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The whole image, once ranks have filled it. Blocks. Raises the errors of `WeightSource`."""
    if "progress" not in description:
        return np.fromfile(description["path"], np.uint8)
    with closing(EngineEnd(description, _OPEN_TIMEOUT_S, counts=False)) as end:
        end.wait_filled(_grid(description).num_buckets)
    wire = description["image"]
    with received_fd(description["fd_socket"], wire["name"], _OPEN_TIMEOUT_S) as fd:
        return np.frombuffer(mmap.mmap(fd, wire["nbytes"], access=mmap.ACCESS_READ), np.uint8)


def _grid(description: Mapping[str, Any]) -> BucketGrid:
    return BucketGrid(
        Manifest.from_wire(description["manifest"]).nbytes, description["bucket_nbytes"]
    )


class _ImageCopy:
    """An image that is complete, such as a follower's copy. Its mapping is private, because a
    loader may write to its tensors."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.manifest = Manifest.from_wire(description["manifest"])
        self._tensors = image_tensors(self.manifest, self._map(description))

    def _map(self, description: Mapping[str, Any]) -> mmap.mmap:
        with open(description["path"], "rb") as file:
            return mmap.mmap(file.fileno(), description["nbytes"], access=mmap.ACCESS_COPY)

    @property
    def memory(self) -> object | None:
        return None

    @property
    def regions(self) -> Regions:
        """None: the engine's process verifies the image."""
        return []

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        tensors = self._loader_tensors()
        for idx, named in enumerate(_named(self.manifest, names)):
            if named:
                self.wait(idx)
            for name in named:
                yield name, tensors[self.manifest.entries[idx].name]

    @contextmanager
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
        yield

    def wait(self, idx: int) -> None:
        """All is there."""

    def blocks(self, idx: int) -> list[ShardBlock]:
        shape = self.manifest.entries[idx].shape
        return [ShardBlock(tuple(0 for _ in shape), shape)]

    def block(self, idx: int, number: int) -> Tensor:
        return self.whole(idx)

    def whole(self, idx: int) -> Tensor:
        return self._tensors[self.manifest.entries[idx].name]

    def _loader_tensors(self) -> Mapping[str, Tensor]:
        return self._tensors


class _ImageSource(_ImageCopy):
    """The image of the node, which is read while ranks fill it."""

    def __init__(
        self,
        description: Mapping[str, Any],
        kept: KeptImage,
        end: EngineEnd,
        device: torch.device,
    ) -> None:
        self._image = kept.receive(description, _OPEN_TIMEOUT_S)
        self._copies = GpuCopies(device, end.set_loaded)
        self._num_noted = 0  # buckets
        self._description = description
        self._grid = _grid(description)
        self._end = end
        super().__init__(description)

    def _map(self, description: Mapping[str, Any]) -> mmap.mmap:
        return self._image.memory

    @property
    def memory(self) -> MappedImage:
        return self._image

    @contextmanager
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
        self._end.check_not_aborted()
        yield
        self._end.check_not_aborted()

    def wait(self, idx: int) -> None:
        """Waits for all pages of the entry: a loader may write to one, which then does not show any
        more what ranks write to it."""
        entry = self.manifest.entries[idx]
        self._end.check_not_aborted()
        self._end.wait_filled(
            self._grid.num_reaching(-(-entry.end // mmap.PAGESIZE) * mmap.PAGESIZE)
        )
        window = slice(entry.offset, entry.end)
        self._image.make_present(window, for_gpu=self._copies.is_on_gpu)
        self._note_loaded(entry.offset // self._grid.bucket_nbytes)

    def finish(self) -> None:
        """Called when everything was taken."""
        self._end.check_not_aborted()
        self._note_loaded(self._grid.num_buckets)

    def settle(self) -> None:
        """Waits for copies to the GPU, also after a failure: the image and the parameters are then
        used otherwise."""
        self._copies.wait()

    def _note_loaded(self, num_buckets: int) -> None:
        if num_buckets > self._num_noted:
            self._num_noted = num_buckets
            self._copies.mark(num_buckets)

    def _loader_tensors(self) -> Mapping[str, Tensor]:
        """In a private mapping, which shows what ranks fill later."""
        wire = self._description
        with received_fd(wire["fd_socket"], wire["image"]["name"], _OPEN_TIMEOUT_S) as fd:
            copy = mmap.mmap(fd, wire["image"]["nbytes"], access=mmap.ACCESS_COPY)
        return image_tensors(self.manifest, copy)


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

    def wait(self, idx: int) -> None:
        """All is there when `reading` has begun."""

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
