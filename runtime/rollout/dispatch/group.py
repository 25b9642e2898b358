from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The tokens that training on a group has to compute. `prompt_len` is 0 if the samples do not
    share a prompt; `lengths` counts tokens beyond it."""

    prompt_len: int
    lengths: Sequence[int]


class Group:
    """Trajectories that are scored together and delivered whole: those of one prompt, in
    evaluations of several."""

    __slots__ = ("group_id", "last_engine", "num_open", "trajectories")

    def __init__(self, group_id: str, trajectories: Sequence[Trajectory]) -> None:
        self.group_id = group_id  # unique in the job, such as `e0/prompt7`
        self.trajectories = list(trajectories)
        self.num_open = len(self.trajectories)  # trajectories that are still being generated
        self.last_engine: EngineId | None = None  # may have the prompt cached

    @property
    def unscored(self) -> list[Trajectory]:
        """The trajectories without a reward yet; an agent loop may have set its own."""
        return [sample for sample in self.trajectories if sample.reward is None]

    @property
    def has_tokens(self) -> bool:
        return any(sample.num_generated for sample in self.trajectories)

    @property
    def rewards(self) -> NDArray[np.float32]:
        """[G]; every trajectory must have been scored."""
        return np.asarray([sample.reward for sample in self.trajectories], np.float32)

    def shape(self) -> GroupShape:
        """Agent loops may have given samples prompts of their own."""
        prompt = self.trajectories[0].prompt_tokens
        if all(np.array_equal(sample.prompt_tokens, prompt) for sample in self.trajectories):
            return GroupShape(len(prompt), [sample.completion_len for sample in self.trajectories])
        return GroupShape(0, [len(sample) for sample in self.trajectories])

    @property
    def has_zero_variance(self) -> bool:
        """All rewards are equal: there is nothing to learn from the group."""
        return len({sample.reward for sample in self.trajectories}) == 1
