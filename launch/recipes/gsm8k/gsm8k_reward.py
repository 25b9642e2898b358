"""The reward of GSM8K: whether the last number of a completion is the right answer."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(
    prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """1.0 for the right number, else 0.0. In the data, `answer` ends in "#### 72"."""
    pairs = zip(completions, answer, strict=True)
    return [
        float(last_number(completion) == last_number(solution)) for completion, solution in pairs
    ]


def last_number(text: str) -> Decimal | None:
    """Without separators of thousands: 1,234.50 is 1234.5. None if there is no number."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
