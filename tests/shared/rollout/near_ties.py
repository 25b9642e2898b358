"""Is a token that float32 chose otherwise than float64 a near-tie? A proof, from float64 logits.

Let all float32 logits be within e of the float64 ones.

- Greedy: if float32 prefers a to b, then l64[a] >= l32[a] - e >= l32[b] - e >= l64[b] - 2 e.
- Sampled: token t is drawn where F[t-1] <= u < F[t], with F the sums of probabilities. Moving each
  logit by at most e multiplies the odds of any set of tokens by e^(-2e) to e^(2e), so the log odds
  of F[t] move by at most 2 e. If float32 draws t and float64 does not, an edge of t has crossed
  u: in float64 it is within 2 e of u, in log odds.

Either way the token is `shortfall` <= 2 e away from being chosen. T: tokens, V: vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def chosen_tokens(logits: Float64Array, draws: Float64Array | None) -> NDArray[np.int64]:
    """[T] tokens chosen by logits [T, V]: greedily, or with numbers drawn from (0, 1) [T]."""
    if draws is None:
        return logits.argmax(-1)
    return np.count_nonzero(_sums(logits) <= draws[:, None], axis=-1)


def logprobs_of(logits: Float64Array, tokens: NDArray[np.int64]) -> Float64Array:
    """[T] the log-probability of each token, by logits [T, V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, tokens[:, None], -1)[:, 0]
    return chosen - np.log(np.exp(shifted).sum(-1))


def shortfall(logits: Float64Array, draw: float | None, token: int) -> float:
    """How far `token` is from being chosen by logits [V], in logits or log odds; 0 where it is."""
    if draw is None:
        return float(logits.max() - logits[token])
    sums = _sums(logits)
    below = float(sums[token - 1]) if token else 0.0
    above = float(sums[token])
    if below <= draw < above:
        return 0.0
    edge = below if draw < below else above
    return abs(_log_odds(edge) - _log_odds(draw))


def _sums(logits: Float64Array) -> Float64Array:
    """[..., V] of probabilities, up to and with each token."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    sums = np.cumsum(weights / weights.sum(-1, keepdims=True), -1)
    sums[..., -1] = 1.0
    return sums


def _log_odds(share: float) -> float:
    if not 0.0 < share < 1.0:
        return np.inf if share >= 1.0 else -np.inf
    return float(np.log(share) - np.log1p(-share))
