"""The loader of a model whose layers all get a recorded plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.engines.loading.weight_source import WeightSource


class WatchedLoader:
    """Args:
    model: has `load_weights` of names and tensors.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        recording = LoaderRecording(self._model)
        with recording, torch.no_grad():
            self._model.load_weights(recording.watch(source.tensors()))
        return recording, {}

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        raise AssertionError("all layers have a plan")
