from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MAX_CHUNK_ELEMENTS: Final = 1 << 25
# Logits processed at once; the float64 sums take 8 bytes each. A larger number raises peak memory,
# a smaller one makes more steps.

# The constants of splitmix64, see `uniforms`.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


def sample(
    logits: Tensor, *, temperatures: Tensor | None, is_greedy: Tensor | None, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling, in float32, or float64 for float64 logits; sums in float64.

    B: sequences, V: vocabulary.

    Args:
        logits: [B, V].
        temperatures: [B, 1] float, 1 where greedy; None when all are 1.
        is_greedy: [B] bool; None when nothing is greedy.
        uniforms: [B, 1] float64 in (0, 1).

    Returns:
        Tokens [B] int64 and logprobs [B] float32 or float64; NaN where logits are not finite.
    """
    num_seqs, vocab_size = logits.shape
    step = max(1, _MAX_CHUNK_ELEMENTS // vocab_size)
    if num_seqs <= step:
        return _sample(logits, temperatures, is_greedy, uniforms)
    chunks = [
        _sample(
            logits[start : start + step],
            None if temperatures is None else temperatures[start : start + step],
            None if is_greedy is None else is_greedy[start : start + step],
            uniforms[start : start + step],
        )
        for start in range(0, num_seqs, step)
    ]
    return torch.cat([tokens for tokens, _ in chunks]), torch.cat([lps for _, lps in chunks])


def _sample(
    logits: Tensor, temperatures: Tensor | None, is_greedy: Tensor | None, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures
    probabilities = torch.softmax(logits, -1)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    # The first token whose sum exceeds the target has a probability above zero.
    tokens = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    if is_greedy is not None:
        tokens = torch.where(is_greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each (trajectory seed, completion position), 52 bits each.

    No state travels with a trajectory: any engine, batch or incarnation that samples its n-th token
    draws the same number. The mixing function is splitmix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014), applied to the seed, then to seed and counter together.
    """
    stream = _mix(seeds + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits and a half: the largest value is still below 1 after rounding to float64.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
