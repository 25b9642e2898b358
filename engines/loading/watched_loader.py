from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.engines.loading.weight_source import WeightSource


class WatchedLoader:
    """A `ModelLoader` for `load_weights` that fills a model's parameters in place.

    Attributes:
        unread: tensors that the last recorded load has not read.
    """

    def __init__(
        self,
        engine: str,
        model: nn.Module,
        load_weights: Callable[[Iterator[tuple[str, Tensor]]], object],
    ) -> None:
        self._engine = engine
        self._model: Any = model
        self._load_weights = load_weights
        self.unread: list[str] = []

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        """Raises WeightSyncError for a parameter that gets no value."""
        with LoaderRecording(self._model) as recording:
            self._load_weights(recording.watch(source.tensors()))
        if getattr(self._model, "quant_config", None) is None:  # else parameters have other shapes
            recording.check_filled(self._engine)
        self.unread = recording.unread()
        return recording, {}

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        self._load_weights(tensors)
