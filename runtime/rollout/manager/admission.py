from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import DataError
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.prompts import Prompt, PromptSet
from umbra.runtime.rollout.rollout_config import RolloutConfig

# Samples of an evaluation in one call of the reward function. More: less overlap with generation.
_EVAL_GROUP_SIZE: Final = 32


class Admission:
    """Turns prompts into groups of fresh trajectories, in an order that the seed alone decides.
    Raises DataError for a prompt that fills the whole context."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._train = PromptSet.open(config.prompts_path)
        self._eval = PromptSet.open(config.eval_path) if config.eval_path else None
        self._order = PromptOrder(len(self._train), config.seed, shuffle=config.shuffle)

    def close(self) -> None:
        self._train.close()
        if self._eval is not None:
            self._eval.close()

    @property
    def num_prompts(self) -> int:
        return len(self._train)

    def training_group(self, order_idx: int) -> Group:
        """The group at an index of the endless prompt order."""
        epoch, idx = self._order.at(order_idx)
        prompt = self._train[idx]
        group_id = f"e{epoch}/{prompt.prompt_id}"
        settings = self._config.settings
        samples: list[Trajectory] = []
        for k in range(settings.group_size):
            seed = trajectory_seed(self._config.seed, epoch, idx, k)
            name = f"{group_id}/{k}"
            samples.append(self._trajectory(name, prompt, seed, settings.max_new_tokens))
        return Group(group_id, samples, order_idx, self._config.reward_parts)

    def epoch_of(self, order_idx: int) -> int:
        return order_idx // len(self._train)

    def evaluation_groups(self) -> list[Group]:
        """The samples of all held-out prompts, prompt after prompt. Raises DataError
        if there are none."""
        if self._eval is None:
            raise DataError("evaluation needs held-out prompts: rollout.eval_path is not set")
        num_each = self._config.eval_samples
        budget = self._config.eval_max_new_tokens or self._config.settings.max_new_tokens
        samples: list[Trajectory] = []
        for idx in range(len(self._eval)):
            prompt = self._eval[idx]
            for k in range(num_each):
                name = f"eval/{prompt.prompt_id}" + (f"/{k}" if num_each > 1 else "")
                seed = trajectory_seed(self._config.seed, -1, idx, k)
                samples.append(self._trajectory(name, prompt, seed, budget))
        return [
            Group(f"eval/{start}", samples[start : start + _EVAL_GROUP_SIZE])
            for start in range(0, len(samples), _EVAL_GROUP_SIZE)
        ]

    def _trajectory(self, sample_id: str, prompt: Prompt, seed: int, budget: int) -> Trajectory:
        limit = self._config.dispatch.max_context_len
        if len(prompt.tokens) >= limit:
            raise DataError(
                f"prompt {prompt.prompt_id!r} has {len(prompt.tokens)} tokens, which leaves no "
                f"room for a completion in a context of {limit}: drop or shorten it, or raise "
                "max_context_len"
            )
        return Trajectory(
            sample_id,
            prompt,
            seed,
            budget=budget,
            max_context_len=limit,
        )


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
    """The order in which prompts are used, and every trajectory's sampling seed.

    Both are pure functions of the job's seed, so a resumed job needs no saved cursor.
    """

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
