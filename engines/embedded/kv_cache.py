"""Keys and values of the running sequences, one row each, without gaps between the rows.

Rows 0..n-1 are the running sequences, so attention over all of them reads one strided view of the
cache: no gather, no page table. A page table would let short sequences share unused space; elastic
rows do it here. All rows have `capacity` tokens, and capacity follows the longest running sequence
in steps (see `scheduler`). A change moves every row once.

L: layers, R: rows that fit, K: key/value heads, C: capacity, D: head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.engines.embedded.parameters import Arena
from umbra.runtime.engine_api.decoder_config import ModelConfig


class KvCache:
    """Owns the arenas of keys and values, `num_tokens` tokens in all.

    Attributes:
        keys, values: per layer [R, K, C, D] in the arena.
        key_groups, value_groups: the same as [R K, C, D], for batched products.
        key_slots, value_slots: the same as [R K C, D], one slot a token and head.
    """

    def __init__(
        self, config: ModelConfig, *, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_tokens = num_tokens
        self.capacity = 0
        self._config = config
        token_elements = config.num_kv_heads * config.head_dim
        self._layer_elements = num_tokens * token_elements
        size_nbytes = config.num_layers * self._layer_elements * dtype.itemsize
        self._arenas = (Arena(size_nbytes, device), Arena(size_nbytes, device))
        shape = (config.num_layers, self._layer_elements)
        self._flat_keys, self._flat_values = (a.view(0, shape, dtype) for a in self._arenas)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_groups: list[Tensor] = []
        self.value_groups: list[Tensor] = []
        self.key_slots: list[Tensor] = []
        self.value_slots: list[Tensor] = []

    @property
    def size_nbytes(self) -> int:
        return sum(arena.size_nbytes for arena in self._arenas)

    @property
    def is_resident(self) -> bool:
        return self._arenas[0].is_resident

    def release(self) -> None:
        for arena in self._arenas:
            arena.release()

    def restore(self) -> None:
        for arena in self._arenas:
            arena.restore()

    def set_capacity(self, capacity: int, *, num_rows: int, num_tokens: int) -> None:
        """Changes the row capacity, keeping the first `num_tokens` tokens of `num_rows` rows."""
        if capacity == self.capacity:
            return
        old_keys, old_values = self.keys, self.values
        self.capacity = capacity
        self.keys, self.key_groups, self.key_slots = self._lay_out(self._flat_keys)
        self.values, self.value_groups, self.value_slots = self._lay_out(self._flat_values)
        if num_rows == 0:
            return
        pairs = zip((*old_keys, *old_values), (*self.keys, *self.values), strict=True)
        for old, new in pairs:
            kept = old[:num_rows, :, :num_tokens].clone()  # old and new overlap in the arena
            new[:num_rows, :, :num_tokens] = kept

    def move_row(self, source: int, target: int, *, num_tokens: int) -> None:
        for layer in (*self.keys, *self.values):
            layer[target, :, :num_tokens] = layer[source, :, :num_tokens]

    def clear_beyond(self, lens: list[int]) -> None:
        """Zeroes all but the first lens[i] tokens of row i. Unused tokens are multiplied by a
        zero probability, which cancels any number but not the NaN or infinity that a broken
        model left behind."""
        for layer in (*self.keys, *self.values):
            layer[len(lens) :] = 0
            for row, num_tokens in enumerate(lens):
                layer[row, :, num_tokens:] = 0

    def _lay_out(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        config, capacity = self._config, self.capacity
        num_rows = self.num_tokens // capacity
        used = flat[:, : num_rows * capacity * config.num_kv_heads * config.head_dim]
        shape = (config.num_layers, num_rows, config.num_kv_heads, capacity, config.head_dim)
        rows = used.view(shape)
        groups, slots = rows.flatten(1, 2), rows.flatten(1, 3)
        return list(rows), list(groups), list(slots)
