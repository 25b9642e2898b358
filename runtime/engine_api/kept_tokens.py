"""The tokens that top-k and top-p keep: one function for the engine that samples and the trainer.

B: sequences, or tokens to score; V: vocabulary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

MAX_SORTED_LOGITS: Final = 1 << 24
# Logits sorted at once. A larger number raises peak memory, a smaller one makes more steps.
SORTED_NBYTES: Final = 32
"""Memory for each sorted logit: itself, its index, probability and sum."""


class Truncation(NamedTuple):
    """The part of the distribution that tokens are drawn from: the `top_k` (0: all) most probable
    tokens, and of these the most probable ones that have at least `top_p` of the probability."""

    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_whole(self) -> bool:
        return self.top_p >= 1 and self.top_k == 0


WHOLE: Final = Truncation()


@torch.no_grad()
def lowest_kept(logits: Tensor, temperatures: Tensor, truncation: Truncation) -> Tensor:
    """[B, 1] the lowest of `logits` [B, V] that is kept, before the temperature. Ties
    are kept, too."""
    step = max(1, MAX_SORTED_LOGITS // logits.shape[-1])
    parts = zip(torch.split(logits, step), torch.split(temperatures, step), strict=True)
    return torch.cat([_lowest_kept(part, heat, truncation) for part, heat in parts])


def _lowest_kept(logits: Tensor, temperatures: Tensor, truncation: Truncation) -> Tensor:
    num_tokens = logits.shape[-1]
    most = min(truncation.top_k or num_tokens, num_tokens)
    ordered = logits.topk(most).values if most < num_tokens else logits.sort(descending=True).values
    if truncation.top_p >= 1:
        return ordered[:, -1:]
    exact = ordered.double() if ordered.dtype == torch.float64 else ordered.float()
    probabilities = (exact / temperatures.to(exact.dtype)).softmax(-1)
    more_probable = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    num_kept = (more_probable < truncation.top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, (num_kept - 1).clamp_(min=0))
