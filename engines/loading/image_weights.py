"""The weights of an update in an image in host memory: the node's, or a copy of one."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.engines.loading.weight_source import BlockCopy, Regions, wanted_names
from umbra.runtime.weights.byte_views import buffer_bytes, typed_view
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.image.fd_server import received_fd
from umbra.runtime.weights.image.gpu_copies import GpuCopies
from umbra.runtime.weights.image.mapped_image import KeptImage, MappedImage
from umbra.runtime.weights.image.sync_progress import EngineEnd
from umbra.runtime.weights.manifest import BucketGrid, Manifest

_OPEN_TIMEOUT_S: Final = 10.0


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
