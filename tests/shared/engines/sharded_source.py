"""Weights in memory as ranks may hold them: a `WeightSource` without a sync."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from umbra.engines.loading.weight_source import BlockCopy, Regions
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.manifest import Manifest

Cut = Callable[[str, tuple[int, ...]], Sequence[ShardBlock]]


def rows(num_ranks: int) -> Cut:
    """FSDP2's shards; the last ranks may get fewer rows, or none."""

    def cut(name: str, shape: tuple[int, ...]) -> list[ShardBlock]:
        if not shape:
            return [ShardBlock((), ())]
        per_rank = math.ceil(shape[0] / num_ranks)
        bounds = [min(rank * per_rank, shape[0]) for rank in range(num_ranks + 1)]
        rest = (0,) * (len(shape) - 1)
        return [
            ShardBlock((start, *rest), (stop - start, *shape[1:]))
            for start, stop in itertools.pairwise(bounds)
        ]

    return cut


class ShardedSource:
    """One version, in memory of its own unless a test sets `memory`.

    Attributes:
        whole_names: tensors that were assembled or given to a loader.
        num_blocks: blocks that were looked for.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        cut: Cut = rows(1),  # noqa: B008 - it has no state
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._tensors = {name: t.to(wire_dtype or t.dtype) for name, t in tensors.items()}
        self.manifest = Manifest.layout(
            (
                (name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
                for name, t in self._tensors.items()
            ),
            aliases or {},
        )
        self.regions: Regions = []
        self.memory: object | None = None
        self.whole_names: list[str] = []
        self.num_blocks = 0
        self._blocks = {name: list(cut(name, tuple(t.shape))) for name, t in tensors.items()}
        self._parts = {
            name: [_part(tensors[name], block) for block in blocks]
            for name, blocks in self._blocks.items()
        }

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        for idx, entry in enumerate(self.manifest.entries):
            aliases = [a for a, name in self.manifest.aliases.items() if name == entry.name]
            wanted = [n for n in (entry.name, *aliases) if names is None or n in names]
            if wanted:
                tensor = self.whole(idx)
                for name in wanted:
                    yield name, tensor

    @contextmanager
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
        yield

    def wait(self, idx: int) -> None:
        """All is there."""

    def blocks(self, idx: int) -> list[ShardBlock]:
        return self._blocks[self.manifest.entries[idx].name]

    def block(self, idx: int, number: int) -> Tensor:
        self.num_blocks += 1
        return self._parts[self.manifest.entries[idx].name][number]

    def whole(self, idx: int) -> Tensor:
        name = self.manifest.entries[idx].name
        self.whole_names.append(name)
        return self._tensors[name].clone()


def _part(tensor: Tensor, block: ShardBlock) -> Tensor:
    """A copy in memory of its own, with strides that no loader expects."""
    for dim, (start, size) in enumerate(zip(block.starts, block.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    if tensor.dim() < 2:
        return tensor.clone()
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)
