"""The rewards of the recipe: a right sum, and a sorted list in the form that was asked for."""

from __future__ import annotations

import operator
import re
from collections import Counter
from decimal import Decimal
from typing import Final

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LIST: Final = re.compile(r"\['[^']*'(?:, '[^']*')*\]")
_ITEM: Final = re.compile(r"'([^']*)'")
FORM, NUMBERS, ORDER = 0.1, 0.4, 0.5
"""Shares of a list's reward: for its form, for having the given numbers, for their order."""


def exact(
    prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """1.0 where the last number of a completion is the answer, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(_last_number(text) == Decimal(expected)) for text, expected in pairs]


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def sorted_list(
    prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """Scores the last list of a completion, such as ['4.0', '40.0', '75.0']: 1.0 if it is right."""
    pairs = zip(completions, answer, strict=True)
    return [_score(_LIST.findall(text), _ITEM.findall(expected)) for text, expected in pairs]


def _score(lists: list[str], expected: list[str]) -> float:
    if not lists:
        return 0.0
    items: list[str] = _ITEM.findall(lists[-1])
    length = max(len(items), len(expected))
    given = (Counter(items) & Counter(expected)).total() / length
    in_order = sum(map(operator.eq, items, expected)) / length
    return FORM + NUMBERS * given + ORDER * in_order
