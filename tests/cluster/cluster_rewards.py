"""The quickstart's reward, slow or with a judge's answer.

`slow` makes a step of 32 groups take a second or more.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from umbra.runtime.rollout.agents.auxiliary_pool import RewardContext
from umbra.trainer.quickstart.quickstart_task import reward

_GROUP_S = 1 / 32


def slow(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: list[Any]
) -> list[float]:
    time.sleep(_GROUP_S)
    return reward(prompts, completions, answer=answer)


async def judged(
    prompts: list[str],
    completions: list[str],
    *,
    ctx: RewardContext,
    answer: list[str],
    **columns: list[Any],
) -> list[float]:
    """Takes a little off for each token of a judge's answer."""
    judge = ctx.pool("judge")
    answers = await asyncio.gather(*(judge.complete(text, 4) for text in prompts))
    rewards = reward(prompts, completions, answer=answer)
    return [
        value - 0.01 * len(answer.tokens) for value, answer in zip(rewards, answers, strict=True)
    ]
