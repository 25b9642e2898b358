"""A reward function for training tests: more for lower digits, which a model learns at once."""

from __future__ import annotations

from typing import Any


def low_digits(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Share of the characters that are 0 to 4; uses a column, to show that it arrives."""
    assert all(answer == "low" for answer in columns["answer"])
    return [sum(c in "01234" for c in text) / 8 for text in completions]
