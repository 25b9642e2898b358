"""Fixes rotary frequencies that depend on a length by the longest context, as engines do.
transformers chooses "longrope" and "dynamic" ones by the longest sequence of a batch: a sample
would have other log-probabilities beside a longer one than alone."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import nn

_FIXED: Final = "fixed"  # any name for which transformers' rotary modules change nothing


@torch.no_grad()
def fix_rotary_frequencies(model: nn.Module, context_len: int) -> None:
    for module in model.modules():
        rotary: Any = module
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_chosen(kinds):
            rotary(torch.empty(0), torch.tensor([[context_len - 1]]))
            rotary.rope_type = _FIXED
        elif isinstance(kinds, dict):  # by the type of a layer
            for layer_type, kind in list(cast("dict[str, str]", kinds).items()):
                if _is_chosen(kind):
                    rotary(torch.empty(0), torch.tensor([[context_len - 1]]), layer_type)
                    kinds[layer_type] = _FIXED


def _is_chosen(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind
