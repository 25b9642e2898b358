from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

ROW_WORDS: Final = 1024
# A row has one coefficient of its own. Shorter rows need more of them; longer rows need more
# registers of a GPU.

FIRST_COLUMN: Final = 1
FIRST_ROW: Final = FIRST_COLUMN + ROW_WORDS
MULTIPLIERS: Final = (0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35)
SHIFTS: Final = (27, 33, 27)
# Pelle Evensen's moremur, whose multipliers fit int64.


def coefficients(first: int, count: int, device: torch.device) -> Tensor:
    """Checksum coefficients from index `first`, as int64 bit patterns: [count]."""
    mixed = torch.arange(first, first + count, device=device)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        high = (mixed >> shift) & ((1 << 64 - shift) - 1)  # int64 shifts copies of the sign in
        mixed = (mixed ^ high) * multiplier
    return mixed | 1
