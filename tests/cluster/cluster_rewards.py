"""The quickstart's reward with a judge's answer."""

from __future__ import annotations

import asyncio
from typing import Any

from umbra.runtime.rollout.agents.auxiliary_pool import RewardContext
from umbra.trainer.quickstart.quickstart_task import reward


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
