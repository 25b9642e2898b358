"""Keys and values of packed rows, laid out for a kernel that takes sequences of any length.

A prompt's rows are keys of its own sequence and of all its completions, so the gradient of such a
row is a sum, here in a fixed order. Adding in place, like `index_select` on a GPU, takes four times
as long and adds in a different order each time.

K: keys of all sequences; L: packed rows, the first P of prompts; U: most uses of a prompt's
row; W: width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Maps keys to packed rows, and packed rows to keys."""

    rows: Tensor  # [K] packed row of each key
    own: Tensor  # [L - P] index of the one key of each completion's row
    shared: Tensor  # [U, P] indices of the keys of each prompt row
    is_use: Tensor  # [U, P] bool, the valid entries of `shared`

    @classmethod
    def invert(
        cls, rows: NDArray[np.int64], num_prompt_rows: int, num_rows: int, device: torch.device
    ) -> KeyRows:
        """`rows` has the packed row of each key, [K]; every packed row is among them."""
        order = np.argsort(rows, kind="stable")  # [K] key indices, sorted by row
        counts = np.bincount(rows, minlength=num_rows)
        firsts = np.cumsum(counts) - counts  # [L] where a row's key indices begin in `order`
        num_uses: int = counts[:num_prompt_rows].max(initial=1)
        use: NDArray[np.int64] = np.arange(num_uses)[:, None]
        is_use: NDArray[np.bool_] = use < counts[:num_prompt_rows]  # [U, P]
        indices = order[firsts[:num_prompt_rows] + np.where(is_use, use, 0)]
        return cls(
            rows=torch.as_tensor(rows, device=device),
            own=torch.as_tensor(order[firsts[num_prompt_rows:]], device=device),
            shared=torch.as_tensor(indices, device=device),
            is_use=torch.as_tensor(is_use, device=device),
        )

    def gather(self, values: Tensor) -> Tensor:
        """[L, W] packed rows to [K, W] keys."""
        untyped: Any = _Gather
        keys: Tensor = untyped.apply(values, self.rows, self.own, self.shared, self.is_use)
        return keys


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: Tensor, own: Tensor, shared: Tensor, is_use: Tensor
    ) -> Tensor:
        ctx.save_for_backward(own, shared, is_use)
        return values.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        own, shared, is_use = ctx.saved_tensors
        (of_keys,) = gradients  # [K, W]
        uses = of_keys.index_select(0, shared.flatten()).view(*shared.shape, -1)  # [U, P, W]
        of_prompts = uses.masked_fill(~is_use.unsqueeze(2), 0).sum(0)
        of_values = torch.cat([of_prompts, of_keys.index_select(0, own)])
        return of_values, None, None, None, None
