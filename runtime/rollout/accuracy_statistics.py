"""Confidence intervals of accuracies and of their differences, and a test of two.

Letters: P prompts, in the same order for A and B.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_Z: Final = 1.959964
"""The normal distribution's quantile at 0.975, for two-sided 95 % intervals."""


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


def paired_interval(
    shares_a: NDArray[np.float64], shares_b: NDArray[np.float64], num_each: int
) -> tuple[float, float]:
    """The 95 % confidence interval of B's accuracy minus A's. The shares [P] are those of right
    samples of each prompt, out of `num_each`.

    Combines the intervals of both accuracies, given the correlation r of the shares. With one
    sample each it is Newcombe's score interval for paired proportions (Statistics in Medicine 1998,
    17:2635, method 8). With several it is the normal interval of the prompts' differences (Miller
    2024).
    """
    (low_a, high_a), (low_b, high_b) = (
        mean_interval(shares, num_each) for shares in (shares_a, shares_b)
    )
    mean_a, mean_b = float(shares_a.mean()), float(shares_b.mean())
    varies = np.ptp(shares_a) > 0 and np.ptp(shares_b) > 0
    r = float(np.corrcoef(shares_a, shares_b)[0, 1]) if varies else 0.0

    def combined(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * r * x * y + y * y))

    difference = mean_b - mean_a
    return (
        difference - combined(mean_b - low_b, high_a - mean_a),
        difference + combined(high_b - mean_b, mean_a - low_a),
    )


def sign_flip_p(gained: NDArray[np.int64]) -> float:
    """The two-sided p value of Fisher's randomization test for pairs (The Design of Experiments,
    1935, section 21), exact: were A and B equally good, each prompt's difference would have either
    sign with probability 1/2. With one sample of each prompt it is McNemar's exact test. `gained`
    [P] are B's right samples minus A's. Convolves one binomial distribution for each size of a
    difference: 0.05 s for 14,000 prompts of 8 samples.
    """
    chances = np.ones(1)  # of each sum of differences, in steps of 2 from the smallest
    sizes, counts = np.unique(np.abs(gained[gained != 0]), return_counts=True)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        flips = _fair_binomial(count)
        wider = np.zeros(len(chances) + size * count)
        for first in range(min(size, len(chances))):  # a flip moves the sum by `size` steps
            wider[first::size] = np.convolve(chances[first::size], flips)
        chances = wider
    sums = 2 * np.arange(len(chances)) - (len(chances) - 1)
    return min(1.0, float(chances[np.abs(sums) >= abs(gained.sum())].sum()))


def _fair_binomial(num: int) -> NDArray[np.float64]:
    """The chances of 0 to `num` heads in `num` throws of a coin, each rounded once."""
    ways, chances = 1, list[float]()
    for heads in range(num + 1):
        chances.append(ways / (1 << num))
        ways = ways * (num - heads) // (heads + 1)
    return np.asarray(chances)
