from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import DataError
from umbra.runtime.weights.shards import local_part, rows_held


class StoredWeights:
    """The weights of a model directory. Reads only the headers of their files, or
    raises DataError."""

    def __init__(self, folder: Path) -> None:
        try:
            self._stored = WeightFiles(folder)
        except DataError as error:
            raise DataError(f"model.path: {error}") from error
        self._folder = folder
        self._tensors = self._stored.tensors
        self.nbytes = sum(file.stat().st_size for file in self._stored.files)
        self.num_elements = sum(math.prod(each.shape) for each in self._tensors.values())

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def obstacle(self, model: nn.Module) -> str:
        """Why these are not simply the model's tensors under their own names, or "" if they are.
        Raises DataError if the model ties tensors that differ here."""
        for names, tensor in distinct_tensors(model):
            stored = [name for name in names if name in self._tensors]
            if not stored:
                return f"they lack {names[0]}"
            if any(self._tensors[name].shape != tuple(tensor.shape) for name in stored):
                return f"{stored[0]} has another shape"
            for one, other in pairwise(stored):
                if not self._stored.are_equal(self._tensors[one], self._tensors[other]):
                    raise DataError(
                        f"model.path: {self._folder}/config.json ties {one} to {other}, which have "
                        "other values: set tie_word_embeddings to false there, or remove one of "
                        "them from the files"
                    )
        return ""

    def float32_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's persistent buffers that are in float32 here, by the last parts of their
        names, which no parameter has: transformers may rename the rest."""
        found = {_last(name) for name, each in self._tensors.items() if each.dtype == "F32"}
        found -= {_last(name) for name, _ in model.named_parameters()}
        persistent = model.state_dict().keys()
        buffers = {name: each for name, each in model.named_buffers() if name in persistent}
        return {name: each for name, each in buffers.items() if _last(name) in found}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes this rank's part of each tensor, in the tensor's dtype. Not collective. The files
        have at least one name of tied tensors. Raises DataError if a file cannot be read."""
        by_file: dict[Path, list[str]] = {}
        for name in tensors:
            if name in self._tensors:
                by_file.setdefault(self._tensors[name].file, []).append(name)
        for file, names in by_file.items():
            with ExitStack() as stack:
                reader = self._open(file, stack)
                try:
                    for name in names:
                        _fill(name, tensors[name], reader)
                except (OSError, SafetensorError) as error:
                    raise self._unreadable(error) from error

    def _open(self, file: Path, stack: ExitStack) -> Any:
        try:
            return stack.enter_context(cast(Any, safe_open(str(file), framework="pt")))
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"model.path: {self._folder} cannot be loaded: {error}")


def distinct_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers, each with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    state = cast("dict[str, Tensor]", model.state_dict(keep_vars=True))
    for name, tensor in state.items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fill(name: str, tensor: Tensor, reader: Any) -> None:
    rows = rows_held(name, tensor, 0) if isinstance(tensor, DTensor) else None
    if rows is None:
        local_part(tensor).copy_(reader.get_tensor(name))
    elif rows[0] < rows[1]:
        local_part(tensor).copy_(reader.get_slice(name)[rows[0] : rows[1]])
