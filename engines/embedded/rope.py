"""Rotary position embeddings (Su et al., RoFormer, 2021) as two lookup tables.

P: positions, D: head dimension. Heads hold the two halves of each rotated pair D/2 apart, as
Hugging Face checkpoints do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from umbra.runtime.engine_api.decoder_config import RopeConfig


def rope_tables(
    config: RopeConfig, *, head_dim: int, num_positions: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines [P, 1, D] and signed sines [P, 1, D], on the CPU. `x * cos + x.roll(D / 2, -1) * sin`
    rotates x: the sign of "rotate half" is in the sines. Angles are float32 whatever the dtype, as
    in transformers, so logits agree with a trainer's."""
    frequencies = _frequencies(config, head_dim)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    cosines = torch.cat((cos, cos), dim=-1)
    sines = torch.cat((-sin, sin), dim=-1)
    return cosines.to(dtype)[:, None].contiguous(), sines.to(dtype)[:, None].contiguous()


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    return _llama3_frequencies(config, plain)


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long waves stretched by `factor`, short ones kept, those between blended."""
    context_len = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > context_len / low, plain / config.factor, plain)
    share = (context_len / wavelengths - low) / (high - low)
    blended = (1 - share) * stretched / config.factor + share * stretched
    is_between = ~(wavelengths < context_len / high) & ~(wavelengths > context_len / low)
    return torch.where(is_between, blended, stretched)
