"""The worker's side of weight updates: all that a worker process of an engine does for one.

The engine's process sends orders through its library's own channels (`AdapterUpdates`):

    order                            report
    probe: allocations               problem: why the worker cannot read the ranks' memory, or ""
    open: weights                    is_staged
    is_staged                        is_staged
    load: weights unless opened      regions, way, and unread unless it loaded a LoRA adapter
    close

`weights` describes an update, and is a plain map:

    image     image, bucket_nbytes, manifest, fd_socket, progress     FillingImage
    exports   exports, manifest, fd_socket, progress,
              has_checksums, is_staged                                ExportedWeights
    copy      path, nbytes, manifest                                  CompleteImage

Image and exports notice an abort of the sync between tensors, and before and after a plan's copies.
An engine on several nodes adds the image's nbytes, and the paths of its copies on the nodes; the
first path is unused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from umbra.engines.loading.copy_plan import CopyPlan, StagedCopies
from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.engines.loading.weight_source import (
    CompleteImage,
    ExportedWeights,
    FillingImage,
    WeightSource,
)
from umbra.runtime.errors import EngineError, ProtocolError, WeightSyncError
from umbra.runtime.weights.exports.exported_image import MakeOpener, OpenedMemory
from umbra.runtime.weights.exports.ipc_memory import CudaOpener, probe_import
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.image.sync_progress import EngineEnd

_OPEN_TIMEOUT_S: Final = 10.0


class ModelLoader(Protocol):
    """The loader of an engine's model. A load that fails may leave the model half-loaded."""

    @property
    def unread(self) -> list[str]:
        """Tensors that the last recorded load has not read."""
        ...

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        """Loads all weights, completely; returns why some layers need the loader, besides
        the recording."""
        ...

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Loads layers, or all of them completely."""
        ...


class WorkerUpdates:
    """Carries out orders about the weights of one model, on one thread, and lives as long as it.

        open ─▶ is_staged ─▶ load       `close` if it is not loaded, and when ranks may have ended

        first version    the engine's loader, watched ──▶ CopyPlan, accepted or not
        later versions   its loader for the layers that need it, then the plan's copies

    A worker may generate between `open` and `load`. `load_adapter` loads a LoRA adapter, and
    returns how.

    Attributes:
        plan: the copies that replace the loader; None before the first version.
        staged: the copies' values in spare memory; None if nothing is staged.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: ModelLoader,
        load_adapter: Callable[[WeightSource], str] | None = None,
        memory: WorkerMemory | None = None,
    ) -> None:
        self._model = model
        self._loader = loader
        self._load_adapter = load_adapter
        self._memory = memory or WorkerMemory()
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise EngineError(
                f"the engine's model, {type(model).__name__}, has no parameters: no weights can be "
                "loaded into it"
            )
        self._device = parameter.device
        self._opened = ExitStack()
        self._source: WeightSource | None = None
        self.plan: CopyPlan | None = None
        self.staged: StagedCopies | None = None
        self._ways = ""
        self._lacked_memory = False  # to stage the update that is loaded next

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out an order; returns the report, with "error" if it failed. Never raises: an
        engine's library would end, or lose the other workers' reports."""
        try:
            match order["action"]:
                case "probe":
                    return {"problem": self._probe(order["allocations"])}
                case "open":
                    self.open(order["weights"])
                    return {"is_staged": self.is_staged}
                case "is_staged":
                    return {"is_staged": self.is_staged}
                case "load":
                    if "weights" in order:
                        self.open(order["weights"])
                    return self.load()
                case "close":
                    self.close()
                    return {}
                case action:
                    raise ProtocolError(f"unknown order {action!r}")
        except Exception as error:  # noqa: BLE001 - the report carries any error to the engine
            return {"error": f"{type(error).__name__}: {error}"}

    def _probe(self, allocations: Sequence[object]) -> str:
        if self._device.type != "cuda":
            return f"its parameters are in {self._device.type} memory, not on a GPU"
        return probe_import(allocations)

    @property
    def is_staged(self) -> bool:
        return self.staged is None or self.staged.is_done

    def open(self, weights: Mapping[str, Any]) -> None:
        """Opens an update, stages it if it says so, and leaves one that was not loaded."""
        self._leave()
        self._source = self._opened.enter_context(self._memory.reading(weights, self._device))
        if weights.get("is_staged"):
            self.staged = self._stage(self._source)
            if self.staged is not None:
                self._opened.callback(self.staged.wait)  # before the ranks' memory is let go

    def load(self) -> dict[str, Any]:
        source, self._source = self._source, None
        if source is None:
            raise WeightSyncError("no update was opened in this worker")
        with self._opened.pop_all():
            report: dict[str, Any] = {}
            if source.manifest.lora is None:
                report |= {"way": self.load_model(source), "unread": self._loader.unread}
            else:
                assert self._load_adapter is not None  # the core has checked the update
                report["way"] = self._load_adapter(source)
            report["regions"] = source.regions
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the worker computes next has the new weights
        return report

    def close(self) -> None:
        """Leaves the update, and closes the memory kept between updates. Idempotent."""
        self._leave()
        self._memory.close()

    def _leave(self) -> None:
        self.staged = None
        self._lacked_memory = False
        if self._source is not None:
            self._source = None
            left = WeightSyncError("the update was left")  # what was not loaded is not finished
            self._opened.pop_all().__exit__(type(left), left, None)

    def _stage(self, source: WeightSource) -> StagedCopies | None:
        """Begins to read the values that the plan copies, while the model is in use; None if there
        are none, no plan fits, or memory is short."""
        if self.plan is None or not self.plan.fits(source.manifest):
            return None
        try:
            return self.plan.stage(source)
        except torch.OutOfMemoryError:
            self._lacked_memory = True
            return None

    def load_model(self, source: WeightSource) -> str:
        """Loads all weights of an open source, maybe from what is staged; returns how, for the
        engine's log."""
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
            plan.replay(source, self.staged)
        way = "; copies were staged" if self.staged is not None else ""
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


class WorkerMemory:
    """Memory that a worker keeps open between updates: the ranks', or its node's image."""

    def __init__(self, make_opener: MakeOpener = CudaOpener) -> None:
        self._exports = OpenedMemory(make_opener)
        self._image = KeptImage()

    @contextmanager
    def reading(self, weights: Mapping[str, Any], device: torch.device) -> Generator[WeightSource]:
        """Opens the described source, with tensors on `device` unless they come from an image. The
        engine's first worker reports its progress."""
        weights = _on_this_node(weights)
        if "progress" not in weights:
            yield CompleteImage(weights)
            return
        with closing(EngineEnd(weights, _OPEN_TIMEOUT_S, counts=_worker_rank() == 0)) as end:
            if "exports" in weights:
                self._image.close()
                has_checksums = bool(weights["has_checksums"])
                try:
                    image = self._exports.image(weights["manifest"], weights["exports"])
                    yield ExportedWeights(image, end, device, has_checksums=has_checksums)
                finally:
                    self._exports.leave()
            else:
                self._exports.close()
                source = FillingImage(weights, self._image, end, device)
                try:
                    yield source
                    source.finish()
                finally:
                    source.settle()

    def close(self) -> None:
        self._exports.close()
        self._image.close()


def _on_this_node(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    paths: Sequence[str] = weights.get("paths", ())
    if not paths:
        return weights
    part = _worker_rank() * len(paths) // torch.distributed.get_world_size()
    if part == 0:
        return weights
    # Without the progress, which is in memory of the leading part's node.
    return {name: weights[name] for name in ("manifest", "nbytes")} | {"path": paths[part]}


def _worker_rank() -> int:
    """The worker's index in the engine; each of its nodes has as many workers."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
