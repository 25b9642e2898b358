from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


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
