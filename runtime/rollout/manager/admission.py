"""Groups of the prompts in their order, and the bound on the age of training data. Pure.

s: optimizer steps done; a batch for s is the one that the trainer trains on next. The age of a
token in it is s less the step of the weights that sampled it. Ages count steps and not version
numbers, because a rollback skips version numbers.

    0 <= age <= max_staleness            of every token of every batch

max_staleness 0 is synchronous on-policy training, 1 is one step off, more is asynchronous.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import DataError, RolloutError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBound:
    """The bound of a job, and its consequences.

    Admission. A group is open from its admission until the step that trained on it is done, or
    until it is dropped. New groups are admitted while fewer than

        groups_per_step * (max_staleness + 1) * over_sampling

    are open (the formula of AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1, less the groups
    that both its sides count). If groups are delivered in the order of admission and over_sampling
    is 1, this alone keeps the bound. Proof: suppose a group is admitted when s steps are done.
    Fewer than G * (k + 1) groups before it are open, and each step until its own takes G of them,
    unless they are dropped. The group is therefore delivered for s + k at the latest. Its first
    token cannot be older than its admission: the batch for s is requested only when every serving
    engine has the weights of s.

    Otherwise other groups may overtake a group. It is dropped as soon as the weights it began with
    are too old (`is_too_old`). `check` verifies every batch before delivery in any case.
    """

    max_staleness: int  # k, in optimizer steps
    groups_per_step: int  # G, of one batch
    over_sampling: float = 1.0  # open groups per group that is needed, 1.0 or more

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.groups_per_step < 1 or self.over_sampling < 1.0:
            raise ValueError(f"impossible bound {self}")

    @property
    def max_open_groups(self) -> int:
        max_open = self.groups_per_step * (self.max_staleness + 1) * self.over_sampling
        return math.ceil(max_open)

    def num_admissible(self, num_open: int) -> int:
        return max(0, self.max_open_groups - num_open)

    def is_too_old(self, token_step: int, step: int) -> bool:
        """Whether a token of weights with `token_step` steps is too old for `step`."""
        return step - token_step > self.max_staleness

    def check(self, token_steps: Iterable[int], step: int, what: str) -> None:
        """Raises RolloutError if a token for `step` breaks the bound, which is a bug in umbra."""
        for token_step in token_steps:
            age = step - token_step
            if not 0 <= age <= self.max_staleness:
                raise RolloutError(
                    f"{what} has tokens from the weights after step {token_step} and would be "
                    f"trained on in step {step + 1}: they are {age} steps old, and 0 to "
                    f"{self.max_staleness} are allowed"
                )


class VersionSteps:
    """Maps each version to the step of its weights. After a rollback, a step may have several."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._newest = -1
        self._step = 0

    def learn(self, version: int, step: int) -> None:
        """`version` is the weights after `step` steps; the first record counts."""
        self._steps.setdefault(version, step)
        self._newest = max(self._newest, version)
        self._step = step

    def __contains__(self, version: int) -> bool:
        return version in self._steps

    def step_of(self, version: int) -> int:
        """The step of a version; raises RolloutError for an older one that nobody announced. A
        version newer than all announced ones is of the step announced last: ranks that wait for its
        batch have published it meanwhile."""
        if version in self._steps:
            return self._steps[version]
        if version > self._newest:
            return self._step
        raise RolloutError(
            f"an engine made tokens with version {version}, which no rank has announced"
        )
