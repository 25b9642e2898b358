"""The scores of an evaluation. P: prompts, n: samples of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.rollout_config import RolloutConfig


def evaluation_scores(rewards: NDArray[np.float32], config: RolloutConfig) -> dict[str, Any]:
    """The scores of all held-out prompts, and under "sets" those of each named set.

    `rewards` [P, n] are in the order of the prompt file. Returns {"num_prompts", "mean_reward",
    "accuracy", "pass_at", "sets"}. Accuracy is the share of right samples, the mean over n samples
    of each prompt. "pass_at" has pass@k for powers of 2 up to n and for n itself, by k as text.
    """
    stops = np.cumsum(list(config.eval_sets.values()))[:-1]
    parts = np.split(rewards, stops) if config.eval_sets else []
    sets = {
        name: _scores(part, config.accuracy_threshold)
        for name, part in zip(config.eval_sets, parts, strict=True)
    }
    return {**_scores(rewards, config.accuracy_threshold), "sets": sets}


def _scores(rewards: NDArray[np.float32], threshold: float) -> dict[str, Any]:
    is_right = rewards >= threshold
    num_each = rewards.shape[1]
    ks = sorted({1 << power for power in range(num_each.bit_length())} | {num_each})
    return {
        "num_prompts": len(rewards),
        "mean_reward": float(rewards.mean(dtype=np.float64)),
        "accuracy": float(is_right.mean()),
        "pass_at": {str(k): pass_at_k(is_right.sum(axis=1), num_each, k) for k in ks},
    }


def pass_at_k(num_right: NDArray[np.integer[Any]], num_each: int, k: int) -> float:
    """The mean over prompts of the probability that one of k samples is right. The unbiased
    estimator of Chen et al. 2021, arXiv:2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k). `num_right`
    [P] is c of each prompt, `num_each` is n, at least k."""
    # All k are wrong: for c right ones out of n, a product of c factors.
    all_wrong = [
        float(np.prod(1.0 - k / np.arange(num_each - c + 1, num_each + 1)))
        if c + k <= num_each
        else 0.0
        for c in range(num_each + 1)
    ]
    return float(np.mean(1.0 - np.asarray(all_wrong)[num_right]))
