"""The reward of a chaos run: the sum of the completion's tokens, read off its text."""

from __future__ import annotations

from typing import Any


def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Token i reads `t<i>`."""
    return [float(sum(int(word[1:]) for word in text.split())) for text in completions]
