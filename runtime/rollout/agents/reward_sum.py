from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from umbra.runtime.errors import RewardError
from umbra.runtime.rollout.agents.reward_function import RewardFunction
from umbra.runtime.rollout.agents.reward_value import REWARD_LIMIT

logger = logging.getLogger(__name__)

ONLY: Final = ""
"""Name of the only reward function."""


class Scores(NamedTuple):
    """`rewards` [G], and `parts` [G] by function before weights: NaN where one does not apply."""

    rewards: list[float]
    parts: dict[str, list[float]]


class RewardSum:
    """Adds the values of several reward functions, each times its weight (default 1). A
    function may return None for a sample that it does not apply to. Where none applies the
    reward is 0, as in TRL."""

    def __init__(
        self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]
    ) -> None:
        self._functions = functions
        self._weights = weights
        self.is_async = any(function.is_async for function in functions.values())

    async def __call__(
        self,
        sample_ids: Sequence[str],
        prompts: list[str],
        completions: list[str],
        rows: Sequence[Mapping[str, Any]],
        facts: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Calls one function after the other, each with its own deadline."""
        arguments = sample_ids, prompts, completions, rows, facts
        if ONLY in self._functions:
            return Scores(await self._functions[ONLY](*arguments), {})
        parts = {name: await function(*arguments) for name, function in self._functions.items()}
        rewards = [
            self._sum(sample_id, {name: values[idx] for name, values in parts.items()})
            for idx, sample_id in enumerate(sample_ids)
        ]
        return Scores(rewards, parts)

    def _sum(self, sample_id: str, values: Mapping[str, float]) -> float:
        weighted = [
            value * self._weights.get(name, 1.0)
            for name, value in values.items()
            if not math.isnan(value)
        ]
        if not weighted:
            _warn_of_none(", ".join(values))
        reward = math.fsum(weighted)
        if abs(reward) > REWARD_LIMIT:
            raise RewardError(
                f"the weighted sum of {', '.join(values)} is {reward:.4g} for sample {sample_id}; "
                f"rewards must lie within {REWARD_LIMIT:.4g} of zero: lower reward.weights"
            )
        return reward


@functools.cache
def _warn_of_none(names: str) -> None:
    logger.warning("none of %s applies to some samples: their reward is 0", names)
