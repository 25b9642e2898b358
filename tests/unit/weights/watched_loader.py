"""The loader of a model whose layers all get a recorded plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from umbra.engines.loading.loader_recording import WatchedLoader


class PlannedLoader(WatchedLoader):
    """Args:
    model: has `load_weights` of names and tensors.
    """

    def __init__(self, model: Any) -> None:
        super().__init__("the test", model, model.load_weights)

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        raise AssertionError("all layers have a plan")
