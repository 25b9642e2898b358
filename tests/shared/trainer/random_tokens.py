"""Tokens of a micro-batch in float64, for comparing losses with plain loops."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs

NUM_TOKENS = 40


def random_tokens(
    spread: float = 0.7, sample_lens: tuple[int, ...] = ()
) -> tuple[Tensor, LossInputs]:
    """Logprobs of the policy, and what belongs to them; weights as "token" has them. `spread`: of
    the logprobs' differences from the engine's and from the proximal ones."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    logprobs = (old + spread * normal()).clamp(max=0.0)
    inputs = LossInputs(
        rollout_logprobs=old,
        proximal_logprobs=(old + spread * normal()).clamp(max=0.0),
        advantages=normal(),
        weights=torch.full((NUM_TOKENS,), 1 / NUM_TOKENS, dtype=torch.float64),
        sample_lens=torch.tensor(sample_lens or [NUM_TOKENS]),
    )
    return logprobs, inputs
