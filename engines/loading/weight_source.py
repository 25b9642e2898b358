from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from umbra.runtime.weights.checksum import CastValues
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.image.gpu_copies import cut_at_pieces
from umbra.runtime.weights.manifest import Manifest

Regions = list[list[int]]
"""[image offset, nbytes, checksum] of each region."""


class BlockCopy(NamedTuple):
    """A copy from a view of a block to a view of a parameter.

    Attributes:
        idx: the block's entry.
        number: the block's index among those of the entry.
        values: in the dtype of the block's holder.
        on_wire: a dtype that values are cast to before the target's, as on their way to the
            loader; None if that makes no difference.
    """

    idx: int
    number: int
    values: Tensor
    target: Tensor
    on_wire: torch.dtype | None

    def carry_out(self) -> None:
        """A copy from the host to a GPU may still be in progress afterwards."""
        self.target.copy_(self._cast_values(), non_blocking=True)

    def parts(self) -> list[BlockCopy]:
        """The same in copies that a GPU can make from locked pages; see `cut_at_pieces`."""
        if not (self.values.is_cpu and self.target.is_cuda):
            return [self]
        return [
            self._replace(values=values, target=target)
            for values, target in cut_at_pieces(self.values, self.target)
        ]

    def expected(self) -> CastValues:
        return CastValues(self._cast_values(), self.target.dtype)

    def _cast_values(self) -> Tensor:
        return self.values if self.on_wire is None else self.values.to(self.on_wire)


class WeightSource(Protocol):
    """The weights of one update as an engine's worker process reads them: tensors, or their blocks.

    Raises WeightSyncError if the ranks' memory cannot be read, or the sync was aborted.
    """

    manifest: Manifest

    @property
    def memory(self) -> object | None:
        """The same object as in an earlier update if every block is still in place: views of blocks
        may be reused as long as it exists. None: views are lost at the end of the update."""
        ...

    @property
    def regions(self) -> Regions: ...

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields names with their tensors, all or some; a tied tensor comes under each of
        its names in a row. A tensor is valid as long as the source is open, and longer if it
        came from a GPU."""
        ...

    def reading(self, copies: Sequence[BlockCopy]) -> AbstractContextManager[None]:
        """A context for carrying out these copies; at its end the blocks count as loaded."""
        ...

    def wait(self, idx: int) -> None:
        """Within `reading`: returns when an entry's blocks may be read."""
        ...

    def blocks(self, idx: int) -> list[ShardBlock]:
        """The blocks of an entry; empty if no copy can be split by them."""
        ...

    def block(self, idx: int, number: int) -> Tensor:
        """A block in its holder's dtype and strides. Must not be written to."""
        ...

    def whole(self, idx: int) -> Tensor:
        """An entry in one piece, contiguous, in the manifest's dtype."""
        ...


def wanted_names(manifest: Manifest, names: Collection[str] | None) -> list[list[str]]:
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    return [
        [
            name
            for name in (entry.name, *aliases.get(entry.name, ()))
            if names is None or name in names
        ]
        for entry in manifest.entries
    ]
