from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from umbra.engines.loading.copy_plan import CopyPlan
from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.engines.loading.staged_copies import StagedCopies
from umbra.engines.loading.weight_source import WeightSource


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
