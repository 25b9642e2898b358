"""Checks what a model's own loader reads and writes, by watching its tensor operations.

Loaders of foreign engines silently skip weights that they do not know or do not get.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from umbra.runtime.errors import WeightSyncError

_Base: Any = TorchDispatchMode  # untyped in torch
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, strides


class WeightCoverage:
    """Watches every operation in its `with` block, on one thread."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._given: dict[str, _Given] = {}
        self._before = {name: _storage(p) for name, p in model.named_parameters()}
        self._mode = _Recorder()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the weights through to the loader; other names of a tensor follow its first one.

        A tensor may be freed before the next one comes, which may reuse its memory.
        """
        last: _Given | None = None
        for name, tensor in weights:
            if last is None or last.tensor() is not tensor:
                last = self._given[name] = _Given(tensor)
            self._mode.read.clear()
            yield name, tensor
            last.look(self._mode.read)
            del tensor

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)

    def check_filled(self, engine: str) -> None:
        """Raises WeightSyncError for parameters that got no value, or only a part."""
        missing = [name for name, p in self._model.named_parameters() if self._lacks(name, p)]
        if missing:
            raise WeightSyncError(
                f"the trainer's weights do not fill {len(missing)} of {engine}'s parameters: "
                f"{', '.join(missing[:5])}"
            )

    def unread(self) -> list[str]:
        """Names of tensors that were never read."""
        for given in self._given.values():
            if given.tensor() is not None:  # the loader may have read it after the last one
                given.look(self._mode.read)
        return [name for name, given in self._given.items() if not given.is_read]

    def _lacks(self, name: str, parameter: nn.Parameter) -> bool:
        if _storage(parameter) != self._before.get(name):
            return False  # the loader has replaced it by another tensor
        regions = self._mode.written.get(_storage(parameter), set())
        return sum(math.prod(shape) for _, shape, _ in regions) < parameter.numel()


class _Given:
    """A tensor given to the loader; `is_read` once something was read from its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.is_read = tensor.nbytes == 0
        self._region = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def look(self, addresses: set[int]) -> None:
        self.is_read = self.is_read or any(address in self._region for address in addresses)


class _Recorder(_Base):
    """Records regions written, by storage, and addresses at which reads began."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.written: dict[int, set[_Region]] = {}
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        made = {_storage(tensor) for tensor in _tensors(result)}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if not isinstance(value, Tensor):
                continue
            if argument.alias_info is not None and argument.alias_info.is_write:
                region = (int(value.storage_offset()), tuple(value.shape), value.stride())
                self.written.setdefault(_storage(value), set()).add(region)
            elif _storage(value) not in made:  # else the result is a view of it
                self.read.add(value.data_ptr())
        return result


def _tensors(result: Any) -> list[Tensor]:
    results = cast("list[Any]", [*result] if isinstance(result, list | tuple) else [result])
    return [tensor for tensor in results if isinstance(tensor, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
