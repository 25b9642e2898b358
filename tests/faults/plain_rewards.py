"""A reward that needs no training to differ between completions."""

from __future__ import annotations

from typing import Any


def distinct(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """The share of different characters."""
    return [len(set(text)) / max(1, len(text)) for text in completions]
