"""Bounds the age of training data; the bound is hard, and enforced in three places. Pure.

s: optimizer steps done; a batch for s is the one that the trainer trains on next. The age of a
token in it is s less the step of the weights that sampled it. Ages count steps and not version
numbers, because a rollback skips version numbers.

    0 <= age <= max_staleness            of every token of every batch

max_staleness 0 is synchronous on-policy training, 1 is one step off, more is asynchronous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from umbra.runtime.errors import RolloutError


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
