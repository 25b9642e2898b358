"""The rewards of the recipe: a right sum anywhere at the end, or in the form that was asked for."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOX: Final = re.compile(r"\\boxed\{(-?\d+)\}")
FORM: Final = 0.1
"""The reward of a number in the form that was asked for, if it is not the answer."""


def exact(
    prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """1.0 where the last number of a completion is the answer, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(_last_number(text) == Decimal(expected)) for text, expected in pairs]


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def boxed(
    prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """1.0 where the last box of a completion, such as \\boxed{-28}, has the answer."""
    pairs = zip(completions, answer, strict=True)
    return [_boxed(_BOX.findall(text), expected) for text, expected in pairs]


def _boxed(boxes: list[str], expected: str) -> float:
    if not boxes:
        return 0.0
    return 1.0 if int(boxes[-1]) == int(expected) else FORM
