"""Evaluations: their progress, scores and intervals. P: prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.manager.rank_rendezvous import CollectiveCall
from umbra.runtime.rollout.rollout_config import RolloutConfig

_Z: Final = 1.959964
"""The normal distribution's quantile at 0.975, for two-sided 95 % intervals."""
_NUM_EACH: Final = 3
"""Worst samples, and as many best. More are too many to read; fewer do not show what varies."""
_MAX_TOKENS: Final = 1024
"""Tokens of a prompt and of a completion. More bloat every rank's answer; fewer cut texts."""


class Evaluation:
    """The groups of an evaluation that ranks ask for by `call`, and how many of them are not scored
    yet. Until the ranks ask, one that `runs_beside` batches continues."""

    def __init__(
        self, call: CollectiveCall, groups: Sequence[Group], *, runs_beside: bool = False
    ) -> None:
        self.call = call
        self.runs_beside = runs_beside
        self.groups = groups
        self.gen_s = 0.0
        self._num_unscored = len(groups)
        self._began = time.monotonic()

    @property
    def is_done(self) -> bool:
        return self._num_unscored == 0

    def progress(self) -> dict[str, int]:
        samples = [sample for group in self.groups for sample in group.trajectories]
        return {
            "groups": len(self.groups),
            "groups_scored": len(self.groups) - self._num_unscored,
            "trajectories": len(samples),
            "trajectories_open": sum(group.num_open for group in self.groups),
            "tokens": sum(sample.num_generated for sample in samples),
        }

    def on_scored(self) -> None:
        self._num_unscored -= 1
        self.gen_s = time.monotonic() - self._began


def worst_and_best(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The samples as plain data, the lowest reward first. All groups must have been scored.

    They are part of the evaluation's outcome, which every rank gets and the ledger keeps, so their
    size is bounded.
    """
    samples = [sample for group in groups for sample in group.trajectories]
    samples.sort(key=lambda sample: float(sample.reward or 0.0))
    if len(samples) > 2 * _NUM_EACH:
        samples = [*samples[:_NUM_EACH], *samples[-_NUM_EACH:]]
    return [_plain(sample) for sample in samples]


def _plain(sample: Trajectory) -> dict[str, Any]:
    segments = [
        [part.start, min(part.stop, _MAX_TOKENS), part.version]
        for part in sample.segments()
        if part.start < _MAX_TOKENS
    ]
    return {
        "prompt_id": sample.prompt.prompt_id,
        "prompt_tokens": sample.prompt_tokens[-_MAX_TOKENS:].tolist(),
        "num_prompt_tokens": len(sample.prompt_tokens),
        "tokens": sample.tokens[:_MAX_TOKENS].tolist(),
        "num_tokens": sample.completion_len,
        "segments": segments,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
    }


def evaluation_scores(rewards: NDArray[np.float32], config: RolloutConfig) -> dict[str, Any]:
    """The scores of all held-out prompts, and under "sets" those of each named set.

    `rewards` [P, n] are in the order of the prompt file. Returns {"num_prompts", "mean_reward",
    "accuracy", "accuracy_interval", "pass_at", "num_right", "sets"}. Accuracy is the share of right
    samples, the mean over n samples of each prompt. "pass_at" has pass@k for powers of 2 up to n
    and for n itself, by k as text. "num_right" [P] has the number of each prompt's right samples.
    """
    stops = np.cumsum(list(config.eval_sets.values()))[:-1]
    parts = np.split(rewards, stops) if config.eval_sets else []
    sets = {
        name: _scores(part, config.accuracy_threshold)
        for name, part in zip(config.eval_sets, parts, strict=True)
    }
    num_right = (rewards >= config.accuracy_threshold).sum(axis=1).tolist()
    scores = _scores(rewards, config.accuracy_threshold)
    return {**scores, "num_right": num_right, "sets": sets}


def _scores(rewards: NDArray[np.float32], threshold: float) -> dict[str, Any]:
    is_right = rewards >= threshold
    num_each = rewards.shape[1]
    low, high = mean_interval(is_right.mean(axis=1), num_each)
    ks = sorted({1 << power for power in range(num_each.bit_length())} | {num_each})
    return {
        "num_prompts": len(rewards),
        "mean_reward": float(rewards.mean(dtype=np.float64)),
        "accuracy": float(is_right.mean()),
        "accuracy_interval": (max(0.0, low), min(1.0, high)),
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


def mean_interval(shares: NDArray[np.float64], num_each: int) -> tuple[float, float]:
    """The 95 % confidence interval of the accuracy, for prompts drawn from all prompts of the kind.
    `shares` [P] are the shares of right samples of each prompt, out of `num_each`.

    With one sample each it is Wilson's score interval (Wilson 1927; recommended by Brown, Cai and
    DasGupta 2001). Samples of one prompt are not independent, so several are clustered by prompt:
    the interval is the normal one of the mean of the shares (Miller 2024, arXiv:2411.00640), which
    may exceed 0 and 1, or Wilson's of P samples if all shares are equal.
    """
    mean, num_prompts = float(shares.mean()), len(shares)
    if num_each == 1 or np.ptp(shares) == 0.0:
        spread = _Z**2 / num_prompts
        center = (mean + spread / 2) / (1 + spread)
        half = math.sqrt(spread * mean * (1 - mean) + spread**2 / 4) / (1 + spread)
    else:
        center, half = mean, _Z * float(shares.std(ddof=1)) / math.sqrt(num_prompts)
    return center - half, center + half


def compare_pairs(gained: NDArray[np.int64], num_each: int) -> tuple[float, tuple[float, float]]:
    """The two-sided p value of A and B being equally good, and the 95 % confidence interval of B's
    accuracy minus A's, which excludes 0 if and only if p is below 0.05. `gained` [P] are B's right
    samples minus A's, out of `num_each`.

    The p value is that of Fisher's randomization test for pairs (The Design of Experiments, 1935,
    section 21), exact: were A and B equally good, each prompt's difference would have either sign
    with probability 1/2. With one sample of each prompt it is McNemar's exact test.

    The accuracies differ by the mean size of a difference times the share by which signs favor B.
    The share's interval inverts the test, with odds of exp(2 * tilt * d) for B at a difference of
    size d: with one sample each it is that of Clopper and Pearson (1934). The squares of the
    distances of both factors from their limits add up, as in Zou and Donner (Statistics in Medicine
    2008, 27:1693).
    """
    sizes, gain = np.abs(gained), int(gained.sum())
    mean_size, total = float(sizes.mean()) / num_each, int(sizes.sum())
    low_size, high_size = mean_interval(sizes / num_each, num_each)
    if not total:
        return 1.0, (-high_size, high_size)
    kinds, counts = np.unique(sizes[sizes > 0], return_counts=True)
    sums = np.arange(-total, total + 1, 2)

    def favor(tilt: float) -> float:
        return float((counts * kinds * np.tanh(tilt * kinds)).sum()) / total

    share = gain / total
    # Where `gain` is likely: chances elsewhere may be too small for a float.
    near = _root(lambda tilt: favor(tilt) - share * (1 - 1 / total))
    with np.errstate(divide="ignore"):
        logs = np.log(_sum_chances(kinds, counts, near))

    def tail(tilt: float, side: int) -> float:
        tilted = logs + (tilt - near) * sums
        chances = np.exp(tilted - tilted.max())
        return float(chances[side * sums >= side * gain].sum() / chances.sum())

    def distance(limit: float, side: int) -> float:
        size = high_size if side * limit > 0 else max(0.0, low_size)
        return math.hypot(mean_size * (limit - share), limit * (size - mean_size))

    below = distance(favor(_root(lambda tilt: tail(tilt, 1) - 0.025)), -1)
    above = distance(favor(_root(lambda tilt: 0.025 - tail(tilt, -1))), 1)
    p = _sum_chances(kinds, counts, 0.0)[np.abs(sums) >= abs(gain)].sum()
    difference = mean_size * share
    return min(1.0, float(p)), (max(-1.0, difference - below), min(1.0, difference + above))


def _root(rising: Callable[[float], float]) -> float:
    """The root between -10 and 10, or the end that is nearest to it."""
    low, high = -10.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def _sum_chances(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], tilt: float
) -> NDArray[np.float64]:
    """The chances of each sum of differences, in steps of 2 from the smallest. Convolves one
    binomial distribution for each size."""
    chances = np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        odds = 2 * tilt * size
        heads = np.arange(1.0, count + 1)
        ways = np.cumsum(np.log((count + 1 - heads) / heads) + odds)
        flips = np.exp(np.append(0.0, ways) - count * np.logaddexp(0.0, odds))
        wider = np.zeros(len(chances) + size * count)
        for first in range(min(size, len(chances))):  # a flip moves the sum by `size` steps
            wider[first::size] = np.convolve(chances[first::size], flips)
        chances = wider
    return chances
