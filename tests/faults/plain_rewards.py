"""Rewards that differ between completions without any training, or more for lower digits, which a
model learns at once."""

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


def low_digits(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Share of the characters that are 0 to 4; uses a column, to show that it arrives."""
    assert all(answer == "low" for answer in columns["answer"])
    return [sum(c in "01234" for c in text) / 8 for text in completions]


def even_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """The number of even digits; none for a completion without a digit."""
    digits = ["".join(filter(str.isdigit, text)) for text in completions]
    return [float(sum(c in "02468" for c in found)) if found else None for found in digits]


async def judged(
    prompts: list[str], completions: list[str], ctx: RewardContext, **columns: list[Any]
) -> list[float]:
    """The same, plus a little for the length of a judge's answer."""
    plain = low_digits(prompts, completions, **columns)
    judge = ctx.pool("judge")
    said = [await judge.complete(f"{text}?", 4) for text in completions]
    return [a + len(answer.tokens) / 1000 for a, answer in zip(plain, said, strict=True)]
