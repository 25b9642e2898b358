"""Opens the weights of an update in an engine's worker process.

The engine's process makes a description, a plain map, and its own channels carry it to the workers:

    image     image, bucket_nbytes, manifest, fd_socket, progress     image_import
    exports   exports, manifest, fd_socket, progress,
              has_checksums, is_staged                                weight_import
    copy      path, nbytes, manifest                                  an image without a sync

Image and exports notice an abort of the sync between tensors, and before and after a plan's copies.
An engine on several nodes adds the image's nbytes, and the paths of its copies on the nodes; the
first path is unused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

import torch

from umbra.engines.loading.exported_weights import ExportedWeights
from umbra.engines.loading.image_weights import CompleteImage, FillingImage
from umbra.engines.loading.planned_loading import PlannedLoading
from umbra.engines.loading.staged_copies import StagedCopies
from umbra.engines.loading.weight_source import WeightSource
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener
from umbra.runtime.weights.transports.cuda_ipc.opened_memory import MakeOpener, OpenedMemory
from umbra.runtime.weights.transports.shared_memory.mapped_image import KeptImage
from umbra.runtime.weights.transports.shared_memory.sync_progress import EngineEnd

_OPEN_TIMEOUT_S: Final = 10.0


class WorkerMemory:
    """Memory that a worker keeps open between updates: the ranks', or its node's image."""

    def __init__(self, make_opener: MakeOpener = CudaOpener) -> None:
        self.exports = OpenedMemory(make_opener)
        self.image = KeptImage()

    def close(self) -> None:
        self.exports.close()
        self.image.close()


class OpenUpdate:
    """An update that a worker opens while it may still generate, and loads later.

        open ─▶ is_staged ─▶ taken      `close` if it is not loaded, and when ranks may have ended

    Attributes:
        staged: the copies' values in spare memory; None if nothing is staged.
    """

    def __init__(self, device: torch.device, memory: WorkerMemory | None = None) -> None:
        self._device = device
        self._memory = memory or WorkerMemory()
        self._opened = ExitStack()
        self._source: WeightSource | None = None
        self.staged: StagedCopies | None = None

    @property
    def is_staged(self) -> bool:
        return self.staged is None or self.staged.is_done

    def open(self, description: Mapping[str, Any], loading: PlannedLoading | None = None) -> None:
        """Opens an update, maybe stages it by `loading`, and leaves one that was not loaded."""
        self._leave()
        weights = open_weights(description, self._device, memory=self._memory)
        self._source = self._opened.enter_context(weights)
        if loading is not None and description.get("is_staged"):
            self.staged = loading.stage(self._source)
            if self.staged is not None:
                self._opened.callback(self.staged.wait)  # before the ranks' memory is let go

    @contextmanager
    def taken(self) -> Generator[WeightSource]:
        source, self._source = self._source, None
        if source is None:
            raise WeightSyncError("no update was opened in this worker")
        with self._opened.pop_all():
            yield source

    def close(self) -> None:
        """Leaves the update, and closes the memory kept between updates. Idempotent."""
        self._leave()
        self._memory.close()

    def _leave(self) -> None:
        self.staged = None
        if self._source is not None:
            self._source = None
            left = WeightSyncError("the update was left")  # what was not taken is not finished
            self._opened.pop_all().__exit__(type(left), left, None)


@contextmanager
def open_weights(
    description: Mapping[str, Any],
    device: torch.device,
    *,
    memory: WorkerMemory | None = None,
) -> Generator[WeightSource]:
    """Opens the described source, with tensors on `device` unless they come from an image. `memory`
    stays open afterwards. The engine's first worker reports its progress."""
    description = _on_this_node(description)
    if "progress" not in description:
        yield CompleteImage(description)
        return
    opened = memory or WorkerMemory()
    try:
        with closing(EngineEnd(description, _OPEN_TIMEOUT_S, counts=_worker_rank() == 0)) as end:
            if "exports" in description:
                opened.image.close()
                yield from _open_exports(description, opened.exports, end, device)
            else:
                opened.exports.close()
                source = FillingImage(description, opened.image, end, device)
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
        yield ExportedWeights(image, end, device, has_checksums=bool(description["has_checksums"]))
    finally:
        opened.leave()


def _on_this_node(description: Mapping[str, Any]) -> Mapping[str, Any]:
    paths: Sequence[str] = description.get("paths", ())
    if not paths:
        return description
    part = _worker_rank() * len(paths) // torch.distributed.get_world_size()
    if part == 0:
        return description
    # Without the progress, which is in memory of the leading part's node.
    return {name: description[name] for name in ("manifest", "nbytes")} | {"path": paths[part]}


def _worker_rank() -> int:
    """The worker's index in the engine; each of its nodes has as many workers."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
