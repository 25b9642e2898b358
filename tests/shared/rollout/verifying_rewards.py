"""Reward functions with math-verify, which sets an alarm for each answer; it is slow to import."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify


def verifies(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """As recipes have it: what cannot be verified is worth nothing."""
    rewards: list[float] = []
    for text in ("$1/2$", "7"):
        try:
            rewards.append(float(verify(parse("0.5"), parse(text))))
        except Exception:  # noqa: BLE001  a parser of anything raises anything
            rewards.append(0.0)
    return rewards


async def verifies_in_a_coroutine(
    prompts: list[str], completions: list[str], **_: Any
) -> list[float]:
    return verifies(prompts, completions)
