"""The worker's side of an update: opens the weights, and loads them into the model.

The engine's process makes a description, a plain map, and its own channels carry it to the workers:

    image     image, bucket_nbytes, manifest, fd_socket, progress     image_weights
    exports   exports, manifest, fd_socket, progress,
              has_checksums, is_staged                                weight_import
    copy      path, nbytes, manifest                                  an image without a sync

Image and exports notice an abort of the sync between tensors, and before and after a plan's copies.
An engine on several nodes adds the image's nbytes, and the paths of its copies on the nodes; the
first path is unused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from umbra.engines.loading.copy_plan import CopyPlan, StagedCopies
from umbra.engines.loading.exported_weights import ExportedWeights
from umbra.engines.loading.image_weights import CompleteImage, FillingImage
from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.engines.loading.weight_source import WeightSource
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.exports.exported_image import MakeOpener, OpenedMemory
from umbra.runtime.weights.exports.ipc_memory import CudaOpener
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.image.sync_progress import EngineEnd

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


class ModelLoader(Protocol):
    """The loader of an engine's model. A load that fails may leave the model half-loaded."""

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        """Loads all weights, completely; returns why some layers need the loader, besides
        the recording."""
        ...

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Loads layers, or all of them completely."""
        ...


class PlannedLoading:
    """Loads versions into one model: by copies where its loader only copies, else by its loader.

        first version    the engine's loader, watched ──▶ CopyPlan, accepted or not
        later versions   its loader for the layers that need it, then the plan

    Lives as long as the model. Calls come from one thread.
    """

    def __init__(self, model: nn.Module, loader: ModelLoader) -> None:
        self._model = model
        self._loader = loader
        self.plan: CopyPlan | None = None
        self._ways = ""
        self._lacked_memory = False  # to stage the update that is loaded next

    def stage(self, source: WeightSource) -> StagedCopies | None:
        """Begins to read the values that `load` copies, while the model is in use; None if
        there are none, no plan fits, or memory is short. The caller waits for it before it
        closes the source."""
        self._lacked_memory = False
        if self.plan is None or not self.plan.fits(source.manifest):
            return None
        try:
            return self.plan.stage(source)
        except torch.OutOfMemoryError:
            self._lacked_memory = True
            return None

    def load(self, source: WeightSource, staged: StagedCopies | None = None) -> str:
        """Loads `source`, with its `stage` if any. Returns how, for the engine's log."""
        plan = self.plan
        if plan is None or not plan.fits(source.manifest):
            self.plan = None
            self.plan = self._record(source)
            self._ways = self._describe(self.plan)
            return f"recorded a load: later weights take {self._ways}"
        if not plan.num_copies:
            self._loader.load(None, source.tensors())
        else:
            if plan.layers:
                self._loader.load(plan.layers, source.tensors(plan.names))
            plan.replay(source, staged)
        way = "; copies were staged" if staged is not None else ""
        if self._lacked_memory:
            way = "; there was no memory to stage copies"
        return f"loaded weights by {self._ways}{way}"

    def _record(self, source: WeightSource) -> CopyPlan:
        recording, reasons = self._loader.record(source)
        plan = CopyPlan(source.manifest, recording, reasons)
        plan.accept(source)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees what recording took: GPUs may be shared with ranks
        return plan

    def _describe(self, plan: CopyPlan) -> str:
        model: Any = self._model
        named: Iterable[tuple[str, nn.Module]] = model.named_modules()
        names = {layer: name or "the model" for name, layer in named}
        widest = sorted(plan.reasons.items(), key=lambda item: item[0] is not self._model)
        reasons = [f"{names[layer]}: {reason}" for layer, reason in widest]
        return (
            f"{plan.num_copies} recorded copies and the engine's loader for "
            f"{len(plan.layers)} layers{f' ({reasons[0]})' if reasons else ''}"
        )
