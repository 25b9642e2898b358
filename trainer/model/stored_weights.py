"""The weights in a model directory; each rank reads only the parts that it needs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.runtime.errors import DataError
from umbra.runtime.weights.shards import local_part, rows_held

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class StoredWeights:
    """The index of the safetensors files of a directory. Reads nothing but their headers.

    Attributes:
        num_elements: of all tensors.
        nbytes: of all files.

    Raises:
        DataError: a file is missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        self.nbytes = 0
        for file in self._find_files():
            with ExitStack() as stack:
                reader = self._open(file, stack)
                for name in cast("list[str]", reader.keys()):
                    self._files[name] = file
                    self._shapes[name] = list(reader.get_slice(name).get_shape())
            self.nbytes += file.stat().st_size
        self.num_elements = sum(map(math.prod, self._shapes.values()))

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._shapes.keys()

    def obstacle(self, model: nn.Module) -> str:
        """Why these are not simply the model's tensors under their own names; "" if they are."""
        for names, tensor in distinct_tensors(model):
            stored = [name for name in names if name in self._files]
            if not stored:
                return f"they lack {names[0]}"
            if len(stored) > 1:  # transformers checks whether they are equal
                return f"they have {' and '.join(stored)}, which are one tensor"
            if self._shapes[stored[0]] != list(tensor.shape):
                return f"{stored[0]} has another shape"
        return ""

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes this rank's part of each tensor, in the tensor's dtype. Not collective.

        Args:
            tensors: by name; of tied tensors, at least one name is in the files.

        Raises:
            DataError: a file cannot be read.
        """
        by_file: dict[Path, list[str]] = {}
        for name in tensors:
            if name in self._files:
                by_file.setdefault(self._files[name], []).append(name)
        for file, names in by_file.items():
            with ExitStack() as stack:
                reader = self._open(file, stack)
                try:
                    for name in names:
                        _fill(name, tensors[name], reader)
                except (OSError, SafetensorError) as error:
                    raise self._unreadable(error) from error

    def _find_files(self) -> list[Path]:
        if not (self._folder / _INDEX).is_file():
            return [self._folder / _SINGLE]
        try:
            index = json.loads((self._folder / _INDEX).read_text(encoding="utf-8"))
            return [self._folder / str(name) for name in sorted(set(index["weight_map"].values()))]
        except (OSError, ValueError, KeyError, AttributeError) as error:
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


def _fill(name: str, tensor: Tensor, reader: Any) -> None:
    rows = rows_held(name, tensor, 0) if isinstance(tensor, DTensor) else None
    if rows is None:
        local_part(tensor).copy_(reader.get_tensor(name))
    elif rows[0] < rows[1]:
        local_part(tensor).copy_(reader.get_slice(name)[rows[0] : rows[1]])
