"""The rewards of the recipe: for a right sum as the last number, or in the form asked for."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOX: Final = re.compile(r"\\boxed\{(-?\d+)\}")


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
    """1.0 where the last box of a completion, such as \\boxed{-28}, has the answer, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(_last_box(text) == int(expected)) for text, expected in pairs]


def _last_box(text: str) -> int | None:
    boxes = _BOX.findall(text)
    return int(boxes[-1]) if boxes else None
