"""Rewards that differ between completions without any training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from umbra.runtime.rollout.agents.auxiliary_pool import RewardContext


def distinct(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Returns the share of different characters."""
    return [len(set(text)) / max(1, len(text)) for text in completions]


def distinct_after_a_while(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    """Like `distinct`, but slow enough for a test to act within a step."""
    time.sleep(0.05)
    return distinct(prompts, completions)


def distinct_once_released(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    """Like `distinct`, but no batch is complete before the file NOTED_IN/released exists."""
    released = Path(os.environ["NOTED_IN"]) / "released"
    while not released.exists():  # a file has no event; `reward.timeout_s` ends the wait
        time.sleep(0.02)
    return distinct(prompts, completions)


async def distinct_by_judge(
    prompts: list[str], completions: list[str], ctx: RewardContext, **columns: list[Any]
) -> list[float]:
    """Like `distinct`, after a judge has answered."""
    answers = [await ctx.pool("judge").complete("all 0=", 2) for _ in completions]
    assert all(answer.tokens for answer in answers)
    return distinct(prompts, completions)
