"""Replaces an engine's loader by the copies that it was seen to make.

CopyPlan          chooses the copies from a recording, and checks them
RepeatedCopies    makes them, from the second version on as a CUDA graph
StagedCopies      makes them in two halves, one of them while the engine generates
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from umbra.engines.loading.loader_recording import (
    LoaderRecording,
    RecordedCopy,
    RecordedFill,
    storage_of,
)
from umbra.engines.loading.weight_source import BlockCopy, WeightSource
from umbra.runtime.weights.copy_planner import (
    CopyPiece,
    ShardBlock,
    SplitError,
    StridedView,
    plan_pieces,
)
from umbra.runtime.weights.manifest import Manifest

_POISON: Final = 0xFF  # makes every floating-point number NaN
_ALIGNMENT: Final = 256  # bytes, of each value in spare memory
_NUM_BRANCHES: Final = 4
# Branches of a CUDA graph. For the 399 copies of an 8B on an H100, one branch takes 12.1 ms, two
# take 11.5 and three or four 11.4.


class CopyPlan:
    """Replays a loader: copies from the source's blocks to views of one model's parameters.

        recording ──CopyPlan.accept──▶ plan ──replay──▶ the parameters of every later version

    Sources are named by entry and elements, so the plan holds for images and exports wherever they
    are. Parameters are named by views of their memory. Views of both sides are prepared once for
    all versions in the same memory, and dropped with it.

    Attributes:
        layers: left to the engine's loader; a layer below another is omitted.
        names: the tensors that `layers` need.
        reasons: why some of `layers` need the loader.
        num_copies: copies that the loader made.
    """

    def __init__(
        self, manifest: Manifest, recording: LoaderRecording, reasons: Mapping[nn.Module, str]
    ) -> None:
        self.reasons: dict[nn.Module, str] = dict(reasons)
        self._manifest = manifest
        self._tensors = recording.tensors
        self._copies: list[RecordedCopy] = recording.copies
        self._fills: list[RecordedFill] = recording.fills
        self._layout: list[list[ShardBlock]] = []
        self._steps: list[_Step] = []
        # By the source's memory. Their views keep it mapped, and go with it.
        self._prepared: WeakKeyDictionary[object, RepeatedCopies] = WeakKeyDictionary()
        self._staged: WeakKeyDictionary[object, StagedCopies] = WeakKeyDictionary()
        self._names = {entry.name: idx for idx, entry in enumerate(manifest.entries)}
        self._names |= {alias: self._names[name] for alias, name in manifest.aliases.items()}
        self._read_otherwise = recording.read_otherwise
        if recording.decides:
            self.reasons[self._tensors.model] = f"its loader decides by values: {recording.decides}"
        for storage, operation in recording.changed.items():
            self._refuse(storage, f"its loader uses {operation}")
        written = {each.target.storage for each in (*self._copies, *self._fills)}
        for storage in recording.read_back & written:
            self._refuse(storage, "something is computed from its parameters")
        for layer in self._tensors.moved():
            self.reasons.setdefault(layer, "its loader moves its parameters")
        self._leave_to_loader()
        if self._unseen(written):
            self.reasons[self._tensors.model] = "nothing was seen to write some of its parameters"
            self._leave_to_loader()

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    @torch.inference_mode()
    def accept(self, source: WeightSource) -> None:
        """Overwrites each parameter, replays its copies, and keeps them only if they restore every
        byte. The model has the weights of `source` before and afterwards. Takes extra memory for
        the largest parameter."""
        self._resolve(source)
        steps: dict[int, list[_Step]] = {}
        for step in self._steps:
            steps.setdefault(storage_of(step.target), []).append(step)
        fills: dict[int, list[RecordedFill]] = {}
        for fill in self._fills:
            fills.setdefault(fill.target.storage, []).append(fill)
        for storage in {*steps, *fills}:
            memory = self._tensors.memory(storage)
            try:
                loaded = memory.clone()
            except torch.OutOfMemoryError:
                self._refuse(storage, "there is no memory to check its copies")
                continue
            memory.fill_(_POISON)
            self._fill(fills.get(storage, ()))
            for step in steps.get(storage, ()):
                self._carry_out(source, step)
            if not torch.equal(memory, loaded):
                memory.copy_(loaded)
                self._refuse(storage, "copies do not give its parameters back")
            elif self._overlaps(storage):
                self._refuse(storage, "its loader writes to the same elements twice")
        self._leave_to_loader()
        self._steps = []

    def fits(self, manifest: Manifest) -> bool:
        """Whether the same tensors come, and the parameters are where they were."""
        return self._manifest == manifest and self._tensors.moved() <= self._left

    @torch.inference_mode()
    def stage(self, source: WeightSource) -> StagedCopies | None:
        """Begins to read the prepared copies' values, all of which must be filled; None if there
        are none. Raises torch.OutOfMemoryError, with nothing staged."""
        copies, memory = self._prepare(source).copies, source.memory
        if memory is None or len({copy.target.device for copy in copies}) != 1:
            return None
        try:
            if memory not in self._staged:
                self._staged[memory] = StagedCopies(copies)
            self._staged[memory].begin()
        except torch.OutOfMemoryError:
            self._staged.clear()
            raise
        return self._staged[memory]

    @torch.inference_mode()
    def replay(self, source: WeightSource, staged: StagedCopies | None = None) -> None:
        """Fills all parameters except those of `layers`, maybe from its `stage`. Copies to a GPU
        may still be in progress when it returns; closing the source waits."""
        prepared = self._prepare(source)
        with source.reading(prepared.copies):
            self._fill(self._fills)
            if staged is not None:
                staged.finish()
            else:
                prepared.carry_out(source.wait)
            for step in self._steps:
                if step.piece is None:
                    source.wait(step.idx)
                    self._carry_out(source, step)

    def _resolve(self, source: WeightSource) -> None:
        layout = [source.blocks(idx) for idx in range(len(self._manifest.entries))]
        if self._steps and layout == self._layout:
            return
        self._layout = layout
        steps = [step for copy in self._copies for step in self._split(copy)]
        self._steps = sorted(steps, key=lambda step: step.idx)  # in the order in which they arrive

    def _split(self, copy: RecordedCopy) -> list[_Step]:
        idx, target = self._names[copy.name], self._tensors.view_of(copy.target)
        shape = self._manifest.entries[idx].shape
        try:
            pieces = plan_pieces(shape, self._layout[idx], copy.source, copy.target.view)
        except SplitError:
            return [_Step(idx, None, copy.source, target)]
        return [_Step(idx, piece, piece.target, _viewed(target, piece.target)) for piece in pieces]

    def _prepare(self, source: WeightSource) -> RepeatedCopies:
        """The copies of pieces, reused if the source has the same memory as before."""
        memory = source.memory
        prepared = None if memory is None else self._prepared.get(memory)
        if prepared is None:
            self._prepared.clear()  # the steps may now be others
            self._staged.clear()
            self._resolve(source)
            prepared = RepeatedCopies(
                [
                    part
                    for step in self._steps
                    if step.piece is not None
                    for part in self._prepare_piece(source, step, step.piece).parts()
                ]
            )
            if memory is not None:
                self._prepared[memory] = prepared
        return prepared

    def _prepare_piece(self, source: WeightSource, step: _Step, piece: CopyPiece) -> BlockCopy:
        block, target = source.block(step.idx, piece.block), step.target
        values = _within(block, piece.source(block.stride()))
        on_wire: torch.dtype = getattr(torch, self._manifest.entries[step.idx].dtype)
        is_cast_twice = values.dtype != on_wire and target.dtype != on_wire  # as for the loader
        return BlockCopy(
            *(step.idx, piece.block, values, target), on_wire if is_cast_twice else None
        )

    def _carry_out(self, source: WeightSource, step: _Step) -> None:
        if step.piece is None:
            values = _within(source.whole(step.idx), step.view)
            copy = BlockCopy(step.idx, 0, values, step.target, None)
        else:
            copy = self._prepare_piece(source, step, step.piece)
        for part in copy.parts():
            part.carry_out()

    def _fill(self, fills: Sequence[RecordedFill]) -> None:
        for fill in fills:
            self._tensors.view_of(fill.target).fill_(fill.value)

    def _overlaps(self, storage: int) -> bool:
        """Whether copies write to the same element, where their order matters."""
        written = [copy.target for copy in self._copies if copy.target.storage == storage]
        filled = [fill.target for fill in self._fills if fill.target.storage == storage]
        memory = self._tensors.memory(storage)
        itemsizes = {target.dtype.itemsize for target in (*written, *filled)}
        if len(itemsizes) > 1:
            return True
        num_elements = memory.numel() // itemsizes.pop()
        if sum(target.view.numel for target in (*written, *filled)) == num_elements:
            return False  # all bytes come back, so each comes once
        counts = torch.zeros(num_elements, dtype=torch.uint8, device=memory.device)
        for target in written:
            _viewed(counts, target.view).add_(1)
        return int(counts.max()) > 1

    def _refuse(self, storage: int, reason: str) -> None:
        for layer in self._tensors.layers[storage]:
            self.reasons.setdefault(layer, reason)

    def _unseen(self, written: set[int]) -> bool:
        """Whether some parameter with a place in the plan got no recorded write."""
        addresses = {storage_of(parameter) for parameter in self._tensors.model.parameters()}
        return any(
            not self._tensors.layers[address] & self._left
            for address in (addresses & self._tensors.layers.keys()) - written
        )

    def _leave_to_loader(self) -> None:
        """Drops the copies of layers that need the loader, and of layers in the same memory."""
        layers: set[nn.Module] = set(self.reasons)
        storages: set[int] = set()
        while True:
            below = {child for layer in layers for child in layer.modules()}
            storages = {at for at, owners in self._tensors.layers.items() if owners & below}
            sharing = {owner for at in storages for owner in self._tensors.layers[at]}
            if sharing | below == layers:
                break
            layers = sharing | below
        self._read_otherwise |= {c.name for c in self._copies if c.target.storage in storages}
        needed = {self._names[name] for name in self._read_otherwise}
        self.names = {name for name, idx in self._names.items() if idx in needed}
        self._copies = [c for c in self._copies if c.target.storage not in storages]
        self._fills = [f for f in self._fills if f.target.storage not in storages]
        self._left = layers
        inner = {child for layer in layers for child in layer.modules() if child is not layer}
        self.layers = [layer for layer in layers if layer not in inner]


class _Step(NamedTuple):
    """One copy from an entry. Without a piece it reads `view` of the whole entry."""

    idx: int
    piece: CopyPiece | None
    view: StridedView
    target: Tensor


def _within(tensor: Tensor, view: StridedView) -> Tensor:
    return tensor.as_strided(view.shape, view.strides, int(tensor.storage_offset()) + view.offset)


def _viewed(tensor: Tensor, view: StridedView) -> Tensor:
    return tensor.as_strided(view.shape, view.strides, view.offset)


class RepeatedCopies:
    """The copies of a plan, carried out once for each version in the same memory.

        first version        copy after copy
        second, and later    a CUDA graph of all copies, in parallel branches, on one GPU

    In the graph a copy begins while another branch's ends, and the CPU launches all of them at
    once. Copies from host memory are made one after the other: each waits for its part. Targets
    must be disjoint, and both sides' memory must stay in place. One thread.
    """

    def __init__(self, copies: Sequence[BlockCopy]) -> None:
        self.copies = copies
        devices = {tensor.device for copy in copies for tensor in (copy.values, copy.target)}
        # A graph has one GPU's copies: another's would be made only once, while it is recorded.
        self._is_on_one_gpu = [device.type for device in devices] == ["cuda"]
        self._was_carried_out = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def carry_out(self, wait: Callable[[int], None] | None = None) -> None:
        """Makes all copies; on a GPU they may still be in progress afterwards. `wait` returns when
        the blocks of an entry may be read."""
        if not (self._is_on_one_gpu and self._was_carried_out):
            for copy in self.copies:
                if wait is not None:
                    wait(copy.idx)
                copy.carry_out()
            self._was_carried_out = True
            return
        if wait is not None:
            for copy in self.copies:
                wait(copy.idx)
        if self._graph is None:
            self._graph = _graph_of(self.copies)
        self._graph.replay()


def _graph_of(copies: Sequence[BlockCopy]) -> torch.cuda.CUDAGraph:
    """Records copies without carrying them out. Other threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    device = copies[0].target.device
    first, *others = (torch.cuda.Stream(device) for _ in range(_NUM_BRANCHES))
    with torch.cuda.stream(first):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for stream in others:
                stream.wait_stream(first)
            try:
                for branch, stream in enumerate((first, *others)):
                    with torch.cuda.stream(stream):
                        for copy in copies[branch::_NUM_BRANCHES]:
                            copy.carry_out()
            finally:  # the end of a capture with open branches would replace the copies' error
                for stream in others:
                    first.wait_stream(stream)
        finally:
            graph.capture_end()
    return graph


class StagedCopies:
    """The copies of a plan in two halves: an engine generates during the first one.

        ranks' memory ──begin, on a stream of its own──▶ spare memory ──finish──▶ parameters
        begin ─▶ is_done, wait ─▶ finish      once for each version

    The first half casts and cuts, and uses the links between GPUs. The second stays within the
    engine's GPU. Owns the spare memory over all versions in the same memory; torch.OutOfMemoryError
    if there is none. The ranks' memory must stay until `wait` returns. One device, one thread.
    """

    @torch.inference_mode()
    def __init__(self, copies: Sequence[BlockCopy]) -> None:
        sizes = [-(-copy.target.nbytes // _ALIGNMENT) * _ALIGNMENT for copy in copies]
        bounds = list(accumulate(sizes, initial=0))
        self._device = copies[0].target.device
        memory = torch.empty(bounds[-1], dtype=torch.uint8, device=self._device)
        spare = [
            _like_target(memory[start:stop], copy.target)
            for copy, (start, stop) in zip(copies, pairwise(bounds), strict=True)
        ]
        pairs = list(zip(copies, spare, strict=True))
        self._to_spare = RepeatedCopies([copy._replace(target=each) for copy, each in pairs])
        self._to_targets = RepeatedCopies(
            [copy._replace(values=each, on_wire=None) for copy, each in pairs]
        )
        is_async = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_async else None
        self._done = torch.cuda.Event() if is_async else None

    @property
    def is_done(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> None:
        """Returns when the ranks' memory is no longer read. Idempotent."""
        if self._done is not None:
            self._done.synchronize()

    @torch.inference_mode()
    def begin(self) -> None:
        if self._stream is None or self._done is None:
            self._to_spare.carry_out()
            return
        # The last version may still be on its way from the spare memory to the parameters.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                self._to_spare.carry_out()
                self._done.record()
        except BaseException:
            self._stream.synchronize()
            raise

    @torch.inference_mode()
    def finish(self) -> None:
        """Copies the values to the targets; copies may still be in progress when it returns."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._to_targets.carry_out()


def _like_target(memory: Tensor, target: Tensor) -> Tensor:
    return memory[: target.nbytes].view(target.dtype).view(target.shape)
