"""How old training data may be: a hard bound, held at three places. Pure.

s: optimizer steps that the trainer has done; a batch for s is what it trains on next.
The age of a token, when it is handed out for s, is s less the steps that were done in the weights
that sampled it. Ages count steps and not version numbers, which a rollback skips some of.

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
    """The bound of a job, and what follows from it.

    Admission. Call a group open from its admission until the step that trained on it is done, or
    until it is dropped. New groups are admitted while fewer than

        groups_per_step * (max_staleness + 1) * over_sampling

    are open (the formula of AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1, less the
    groups that both its sides count). Where groups are handed out in the order of admission and
    over_sampling is 1, that alone keeps the bound: say a group is admitted when s steps are done.
    Of those before it, fewer than G * (k + 1) are open, and each step until its own takes G of
    these, or they are dropped. So it is handed out for s + k at the latest, and its first token
    cannot be older than its admission: the batch for s is asked for once every engine that serves
    has the weights of s, also where they are updated one after the other.

    Otherwise a group can be overtaken. Then it is dropped as soon as the weights it was begun with
    are too old (`is_too_old`); and whatever happened, `check` is the last word at hand-out.

    Attributes:
        max_staleness: k, in optimizer steps.
        groups_per_step: G, of one batch.
        over_sampling: open groups for each one that is needed, 1.0 or more. What then comes too
            late is dropped.
    """

    max_staleness: int
    groups_per_step: int
    over_sampling: float = 1.0

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.groups_per_step < 1 or self.over_sampling < 1.0:
            raise ValueError(f"impossible bound {self}")

    @property
    def max_open_groups(self) -> int:
        wanted = self.groups_per_step * (self.max_staleness + 1) * self.over_sampling
        return math.ceil(wanted)

    def room(self, num_open: int) -> int:
        """Groups that may be admitted now."""
        return max(0, self.max_open_groups - num_open)

    def is_too_old(self, token_step: int, step: int) -> bool:
        """Whether a token of weights with `token_step` steps is of no use for `step` and later."""
        return step - token_step > self.max_staleness

    def check(self, token_steps: Iterable[int], step: int, what: str) -> None:
        """Raises RolloutError where a token that is to be handed out for `step` breaks the bound.

        That is a mistake in umbra: nothing a user does leads here.
        """
        for token_step in token_steps:
            age = step - token_step
            if not 0 <= age <= self.max_staleness:
                raise RolloutError(
                    f"{what} has tokens of the weights after step {token_step} and was to be "
                    f"trained on in step {step + 1}: {age} steps old, where 0 to "
                    f"{self.max_staleness} are allowed"
                )


class VersionSteps:
    """Which step's weights each version is. A step may have several, after a rollback."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._newest = -1
        self._step = 0

    def learn(self, version: int, step: int) -> None:
        """The weights after `step` steps are `version`; what was said of it first counts."""
        self._steps.setdefault(version, step)
        self._newest = max(self._newest, version)
        self._step = step

    def __contains__(self, version: int) -> bool:
        return version in self._steps

    def step_of(self, version: int) -> int:
        """One newer than all that were announced is of the step announced last: ranks that wait
        for its batch have published it meanwhile.

        Raises:
            RolloutError: an older version that nobody announced.
        """
        if version in self._steps:
            return self._steps[version]
        if version > self._newest:
            return self._step
        raise RolloutError(
            f"an engine made tokens with version {version}, which no rank has announced"
        )
