"""The weights of an update as a worker reads them: from the ranks' exports, or from an image in
host memory, the node's or a copy of one."""

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

from umbra.runtime.weights.checksum import CastValues, numbers_on, sum_all, to_checksums
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.exports.exported_image import ExportedImage
from umbra.runtime.weights.image.fd_server import received_fd
from umbra.runtime.weights.image.gpu_copies import GpuCopies, cut_at_pieces
from umbra.runtime.weights.image.mapped_image import KeptImage, MappedImage
from umbra.runtime.weights.image.sync_progress import EngineEnd
from umbra.runtime.weights.manifest import BucketGrid, Manifest
from umbra.runtime.weights.shards import buffer_bytes, flatten, typed_view

Regions = list[list[int]]
"""[image offset, nbytes, checksum] of each region."""
_OPEN_TIMEOUT_S: Final = 10.0
_MOST_HELD_NBYTES: Final = 256 << 20
# Copies of parameters in other dtypes that checksums hold at a time. Less means more launches;
# without a limit, an engine that holds float16 would need the memory of another model.


class BlockCopy(NamedTuple):
    """A copy from a view of a block to a view of a parameter.

    Attributes:
        idx: the block's entry.
        number: the block's index among those of the entry.
        values: in the dtype of the block's holder.
        on_wire: a dtype that values are cast to before the target's, as on their way to the
            loader; None if that makes no difference.
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
        """The same in copies that a GPU can make from locked pages; see `cut_at_pieces`."""
        if not (self.values.is_cpu and self.target.is_cuda):
            return [self]
        return [
            self._replace(values=values, target=target)
            for values, target in cut_at_pieces(self.values, self.target)
        ]

    def expected(self) -> CastValues:
        return CastValues(self._cast_values(), self.target.dtype)

    def _cast_values(self) -> Tensor:
        return self.values if self.on_wire is None else self.values.to(self.on_wire)


class WeightSource(Protocol):
    """The weights of one update as an engine's worker process reads them: tensors, or their blocks.

    Raises WeightSyncError if the ranks' memory cannot be read, or the sync was aborted.
    """

    manifest: Manifest

    @property
    def memory(self) -> object | None:
        """The same object as in an earlier update if every block is still in place: views of blocks
        may be reused as long as it exists. None: views are lost at the end of the update."""
        ...

    @property
    def regions(self) -> Regions: ...

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields names with their tensors, all or some; a tied tensor comes under each of
        its names in a row. A tensor is valid as long as the source is open, and longer if it
        came from a GPU."""
        ...

    def reading(self, copies: Sequence[BlockCopy]) -> AbstractContextManager[None]:
        """A context for carrying out these copies; at its end the blocks count as loaded."""
        ...

    def wait(self, idx: int) -> None:
        """Within `reading`: returns when an entry's blocks may be read."""
        ...

    def blocks(self, idx: int) -> list[ShardBlock]:
        """The blocks of an entry; empty if no copy can be split by them."""
        ...

    def block(self, idx: int, number: int) -> Tensor:
        """A block in its holder's dtype and strides. Must not be written to."""
        ...

    def whole(self, idx: int) -> Tensor:
        """An entry in one piece, contiguous, in the manifest's dtype."""
        ...


def wanted_names(manifest: Manifest, names: Collection[str] | None) -> list[list[str]]:
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


class CompleteImage:
    """An image in host memory that is complete, such as a follower's copy. Its mapping is private,
    because a loader may write to its tensors."""

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
        """Empty: the engine's process verifies the image."""
        return []

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        tensors = self._loader_tensors()
        for idx, named in enumerate(wanted_names(self.manifest, names)):
            if named:
                self.wait(idx)
            for name in named:
                yield name, tensors[self.manifest.entries[idx].name]

    @contextmanager
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
        yield

    def wait(self, idx: int) -> None:
        """Returns at once: the image is complete."""

    def blocks(self, idx: int) -> list[ShardBlock]:
        shape = self.manifest.entries[idx].shape
        return [ShardBlock(tuple(0 for _ in shape), shape)]

    def block(self, idx: int, number: int) -> Tensor:
        return self.whole(idx)

    def whole(self, idx: int) -> Tensor:
        return self._tensors[self.manifest.entries[idx].name]

    def _loader_tensors(self) -> Mapping[str, Tensor]:
        return self._tensors


class FillingImage(CompleteImage):
    """The image of the node, read while ranks fill it."""

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
        """Waits for all pages of the entry: one that a loader writes to hides the
        ranks' later writes."""
        entry = self.manifest.entries[idx]
        self._end.check_not_aborted()
        self._end.wait_filled(
            self._grid.num_reaching(-(-entry.end // mmap.PAGESIZE) * mmap.PAGESIZE)
        )
        window = slice(entry.offset, entry.end)
        self._image.make_present(window, for_gpu=self._copies.is_on_gpu)
        self._note_loaded(entry.offset // self._grid.bucket_nbytes)

    def finish(self) -> None:
        self._end.check_not_aborted()
        self._note_loaded(self._grid.num_buckets)

    def settle(self) -> None:
        """Waits for copies to the GPU, even after a failure, because the memory is reused."""
        self._copies.wait()

    def _note_loaded(self, num_buckets: int) -> None:
        if num_buckets > self._num_noted:
            self._num_noted = num_buckets
            self._copies.mark(num_buckets)

    def _loader_tensors(self) -> Mapping[str, Tensor]:
        """Tensors in a private mapping, which shows what ranks fill later."""
        wire = self._description
        with received_fd(wire["fd_socket"], wire["image"]["name"], _OPEN_TIMEOUT_S) as fd:
            copy = mmap.mmap(fd, wire["image"]["nbytes"], access=mmap.ACCESS_COPY)
        return image_tensors(self.manifest, copy)


def filled_image(description: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The whole image, once ranks have filled it. Blocks. Raises the errors of `WeightSource`."""
    if "progress" not in description:
        return np.fromfile(description["path"], np.uint8)
    with closing(EngineEnd(description, _OPEN_TIMEOUT_S, counts=False)) as end:
        end.wait_filled(_grid(description).num_buckets)
    wire = description["image"]
    with received_fd(description["fd_socket"], wire["name"], _OPEN_TIMEOUT_S) as fd:
        return np.frombuffer(mmap.mmap(fd, wire["nbytes"], access=mmap.ACCESS_READ), np.uint8)


def image_tensors(manifest: Manifest, memory: mmap.mmap) -> dict[str, Tensor]:
    """The manifest's tensors as views of an image, which stays mapped while they live."""
    image = buffer_bytes(memory)
    return {
        entry.name: typed_view(image[entry.offset : entry.end], entry.dtype, entry.shape)
        for entry in manifest.entries
    }


def _grid(description: Mapping[str, Any]) -> BucketGrid:
    return BucketGrid(
        Manifest.from_wire(description["manifest"]).nbytes, description["bucket_nbytes"]
    )


class ExportedWeights:
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
        """Checksums of parameters where copies of blocks filled them, else of the values read."""
        if not self._has_checksums:
            return []
        found = [region for idx in range(self._num_entries) for region in self._image.regions(idx)]
        checksums = to_checksums(self._sums)
        return [[*region, each] for region, each in zip(found, checksums, strict=True)]

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Reports the progress of each entry the first time that it is taken."""
        wanted = wanted_names(self.manifest, names)
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
        """Returns at once: `reading` has waited for everything."""

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
        Other regions start from the rank's own sum, plus the differences of the parameters that got
        a part of it, which are zero if all is well."""
        by_block: dict[tuple[int, int], list[BlockCopy]] = {}
        for copy in copies:
            by_block.setdefault((copy.idx, copy.number), []).append(copy)
        terms: list[_Term] = []
        held_nbytes = 0
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
                    if copy.on_wire is not None:  # what is expected is a copy
                        held_nbytes += terms[-1].content.values.nbytes
            if held_nbytes > _MOST_HELD_NBYTES:
                self._add_up(terms)
                terms, held_nbytes = [], 0
        self._summed.update(range(self._num_entries))
        self._add_up(terms)

    @torch.inference_mode()
    def _add_up(self, terms: Sequence[_Term]) -> None:
        """Adds the terms to their regions' checksums, on the GPU."""
        if terms:
            device = self._sums.device
            contents = [term.content for term in terms]
            sums = sum_all([CastValues(each.values.to(device), each.dtype) for each in contents])
            signs = numbers_on(sums.device, [term.sign for term in terms])
            regions = numbers_on(sums.device, [term.region for term in terms])
            self._sums.index_add_(0, regions, sums * signs)

    def _dtype_on_wire(self, idx: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.manifest.entries[idx].dtype)
        return dtype


class _Term(NamedTuple):
    region: int
    content: CastValues
    sign: int = 1


def _is_whole(copy: BlockCopy, part: Tensor, on_wire: torch.dtype) -> bool:
    """Whether the target has all bytes of a rank's part, in the order in which they travel."""
    return (
        copy.target.dtype == on_wire
        and copy.values.numel() == part.numel()
        and copy.values.is_contiguous()
        and part.is_contiguous()
    )
