"""Watches a model's own loader: which tensors it reads, and what it writes to which parameters.

    given tensor ──view──▶ copy_ ──▶ view of a parameter       recorded: may be replayed
                           fill_, zero_ ──▶ view               recorded: padding
    anything else that reads a given tensor                     its name is read otherwise
    anything else that writes to a parameter, or reads one      its layer needs the loader
        that is also written

Loaders of foreign engines silently skip weights that they do not know or do not get, so the
recording also tells what was left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from umbra.engines.loading.weight_source import WeightSource
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.copy_planner import StridedView

_Base: Any = TorchDispatchMode  # untyped in torch
_aten: Any = torch.ops.aten
_COPY: Final[Any] = _aten.copy_.default
_FILLS: Final[frozenset[Any]] = frozenset(
    (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
)


@dataclass(frozen=True, slots=True)
class WrittenView:
    storage: int
    view: StridedView
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RecordedCopy:
    """A copy from `source`, a view of the contiguous given tensor `name`."""

    name: str
    source: StridedView
    target: WrittenView


@dataclass(frozen=True, slots=True)
class RecordedFill:
    value: float
    target: WrittenView


class ModelTensors:
    """The parameters and buffers of a model at one time; `layers` has the modules with a tensor in
    a storage, by its address."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[int, set[nn.Module]] = {}
        self._memories: dict[int, Tensor] = {}
        self._places: list[_Place] = []
        for layer in model.modules():
            for kind in (layer._parameters, layer._buffers):  # pyright: ignore[reportPrivateUsage]
                for key, tensor in kind.items():
                    if tensor is not None:
                        self._add(
                            _Place(layer, kind, key, tensor, tensor.detach(), tensor.data_ptr())
                        )

    def _add(self, place: _Place) -> None:
        self._places.append(place)
        address = storage_of(place.tensor)
        if address:
            self.layers.setdefault(address, set()).add(place.layer)
            self._memories.setdefault(address, place.memory)

    def moved(self) -> set[nn.Module]:
        """The layers of which a tensor was replaced, or has moved to other memory."""
        # vLLM's parameters are of a subclass, whose methods would take ten times as long.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return {place.layer for place in self._places if place.is_replaced or place.is_moved}

    def put_back(self) -> None:
        for place in self._places:
            if place.is_moved and not place.is_replaced:
                place.tensor.data = place.memory

    def view_of(self, written: WrittenView) -> Tensor:
        memory = self.memory(written.storage)
        whole = memory[: memory.numel() // written.dtype.itemsize * written.dtype.itemsize]
        view = written.view
        return whole.view(written.dtype).as_strided(view.shape, view.strides, view.offset)

    def memory(self, storage: int) -> Tensor:
        """All bytes of a storage: uint8 [N]."""
        tensor = self._memories[storage]
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return empty.set_(tensor.untyped_storage())  # pyright: ignore[reportUnknownMemberType]


class _Place(NamedTuple):
    layer: nn.Module
    kind: Mapping[str, Tensor | None]
    key: str
    tensor: Tensor
    memory: Tensor
    address: int

    @property
    def is_replaced(self) -> bool:
        return self.kind.get(self.key) is not self.tensor

    @property
    def is_moved(self) -> bool:
        return self.tensor.data_ptr() != self.address


class LoaderRecording:
    """Watches every operation in its `with` block, on one thread.

    Attributes:
        tensors: the model's, where they were when the recording began.
        copies, fills: in order; only the last of several writes to the same view.
        read_otherwise: names of given tensors that were not only copied to parameters.
        changed: addresses of storages that were written otherwise, and by which operation.
        read_back: addresses of storages that were read.
        decides: the operation by which the loader looked at values, or "".
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: storage_of(p) for name, p in model.named_parameters()}
        self._given = _Given()
        self._mode = _Watch(self)
        self.tensors = ModelTensors(model)
        self._copies: dict[WrittenView, RecordedCopy] = {}
        self._fills: dict[WrittenView, RecordedFill] = {}
        self._read: set[str] = set()
        self._written: dict[int, set[StridedView]] = {}
        self.read_otherwise: set[str] = set()
        self.changed: dict[int, str] = {}
        self.read_back: set[int] = set()
        self.decides = ""
        self._is_paused = False

    @property
    def copies(self) -> list[RecordedCopy]:
        return list(self._copies.values())

    @property
    def fills(self) -> list[RecordedFill]:
        return list(self._fills.values())

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the weights through to the loader; other names of a tensor follow its first one. A
        tensor may be freed before the next one comes, which may reuse its memory."""
        last: Tensor | None = None
        for name, tensor in weights:
            if last is not tensor:
                self._given.add(name, tensor)
            last = tensor
            yield name, tensor
            del tensor

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._mode.__exit__(*exc_info)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Operations in the block only count as reads of given tensors."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def check_filled(self, engine: str) -> None:
        """Raises WeightSyncError for parameters that were not written, or only in part."""
        missing = [name for name, p in self._model.named_parameters() if self._lacks(name, p)]
        if missing:
            raise WeightSyncError(
                f"the trainer's weights do not fill {len(missing)} of {engine}'s parameters: "
                f"{', '.join(missing[:5])}"
            )

    def num_written(self, parameter: Tensor) -> int:
        return sum(view.numel for view in self._written.get(storage_of(parameter), ()))

    def unread(self) -> list[str]:
        return [name for name in self._given.names if name not in self._read]

    def _lacks(self, name: str, parameter: nn.Parameter) -> bool:
        if storage_of(parameter) != self._before.get(name):
            return False  # the loader has replaced it by another tensor
        return self.num_written(parameter) < parameter.numel()

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        made = {storage_of(tensor) for tensor in _tensors(result)}
        read: list[Tensor] = []
        written: list[Tensor] = []
        for idx, argument in enumerate(func._schema.arguments):
            value = args[idx] if idx < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                if is_written:
                    written.append(tensor)
                elif storage_of(tensor) not in made:  # else the result is a view of it
                    read.append(tensor)
        for tensor in read:
            found = self._given.find(tensor)
            if found is not None:
                self._read.add(found)
                if self._is_paused:
                    self.read_otherwise.add(found)
        if self._is_paused:
            return
        if not (func is _COPY and self._note_copy(written[0], read)) and not (
            func in _FILLS and self._note_fill(written[0], read, args)
        ):
            self._note_other(func, read, written, has_result=bool(made))

    def _note_copy(self, target: Tensor, read: list[Tensor]) -> bool:
        written = self._target(target)
        name = self._given.find(read[0]) if read else None
        if written is None or name is None:
            return False
        source = self._given.view_of(name, read[0])
        if source is None or source.shape != written.view.shape:
            return False
        self._copies.pop(written, None)
        self._copies[written] = RecordedCopy(name, source, written)
        self._written.setdefault(written.storage, set()).add(written.view)
        return True

    def _note_fill(self, target: Tensor, read: list[Tensor], args: tuple[Any, ...]) -> bool:
        written = self._target(target)
        if written is None or any(self._is_known(tensor) for tensor in read):
            return False
        value = args[1] if len(args) > 1 else 0
        self._fills.pop(written, None)
        number = float(value.item() if isinstance(value, Tensor) else value)
        self._fills[written] = RecordedFill(number, written)
        self._written.setdefault(written.storage, set()).add(written.view)
        return True

    def _note_other(
        self, func: Any, read: list[Tensor], written: list[Tensor], *, has_result: bool
    ) -> None:
        for tensor in written:
            target = self._target(tensor)
            if target is not None:
                self.changed.setdefault(target.storage, str(func))
                self._written.setdefault(target.storage, set()).add(target.view)
        for tensor in read:
            name = self._given.find(tensor)
            if name is not None:
                self.read_otherwise.add(name)
            elif storage_of(tensor) in self.tensors.layers:
                self.read_back.add(storage_of(tensor))
                continue
            if not has_result and not written:
                self.decides = self.decides or str(func)

    def _target(self, tensor: Tensor) -> WrittenView | None:
        address = storage_of(tensor)
        if address not in self.tensors.layers:
            return None
        view = StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        return WrittenView(address, view, tensor.dtype)

    def _is_known(self, tensor: Tensor) -> bool:
        return self._given.find(tensor) is not None or storage_of(tensor) in self.tensors.layers


class _Given:
    """The tensors given to the loader, while they or views of them exist."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._starts: list[int] = []  # addresses, ascending
        self._by_start: dict[int, tuple[str, int, StorageWeakRef]] = {}  # name, end, storage
        self._tensors: dict[str, tuple[int, torch.dtype, bool]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.nbytes == 0:
            return  # there is nothing to read
        self.names.append(name)
        start = tensor.data_ptr()
        self._tensors[name] = start, tensor.dtype, tensor.is_contiguous()
        if start not in self._by_start:
            bisect.insort(self._starts, start)
        ref = StorageWeakRef(tensor.untyped_storage())
        self._by_start[start] = name, start + tensor.nbytes, ref

    def find(self, tensor: Tensor) -> str | None:
        """The name of the given tensor in whose memory this one begins."""
        address = tensor.data_ptr()
        idx = bisect.bisect_right(self._starts, address) - 1
        while idx >= 0:
            name, end, storage = self._by_start[self._starts[idx]]
            if not storage.expired():
                return name if address < end else None
            del self._by_start[self._starts.pop(idx)]  # others may have its memory by now
            idx -= 1
        return None

    def view_of(self, name: str, tensor: Tensor) -> StridedView | None:
        start, dtype, is_contiguous = self._tensors[name]
        if tensor.dtype != dtype or not is_contiguous or tensor.is_conj() or tensor.is_neg():
            return None
        offset = (tensor.data_ptr() - start) // dtype.itemsize
        return StridedView(offset, tuple(tensor.shape), tensor.stride())


class _Watch(_Base):
    def __init__(self, recording: LoaderRecording) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        self._recording.note(func, args, kwargs or {}, result)
        return result


def storage_of(tensor: Tensor) -> int:
    """The address of its storage; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    values = cast("list[Any]", [*value] if isinstance(value, list | tuple) else [value])
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


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
