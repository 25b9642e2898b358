"""The order in which prompts are used, and every trajectory's sampling seed.

Both are pure functions of the job's seed, so a resumed job needs no saved cursor.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of an epoch: a pure function of its arguments, on any numpy version."""
    key = _hash64("order", seed, epoch)
    with np.errstate(over="ignore"):
        mixed = np.arange(num_prompts, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64(key)
        # the finaliser of splitmix64: a bijection, so no two indices tie
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable").astype(np.int64)


class PromptOrder:
    def __init__(self, num_prompts: int, seed: int, *, shuffle: bool = True) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(num_prompts)

    def at(self, order_idx: int) -> tuple[int, int]:
        """(epoch, index of the prompt) at `order_idx` of the sequence."""
        epoch, offset = divmod(order_idx, self._num_prompts)
        if self._shuffle and epoch != self._epoch:
            self._order = epoch_order(self._num_prompts, self._seed, epoch)
            self._epoch = epoch
        return epoch, int(self._order[offset])


def trajectory_seed(seed: int, epoch: int, prompt_idx: int, sample_idx: int) -> int:
    return _hash64("trajectory", seed, epoch, prompt_idx, sample_idx) >> 1


def _hash64(*parts: object) -> int:
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
