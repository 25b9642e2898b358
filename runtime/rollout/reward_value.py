"""What a reward may be, whoever gives it."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from umbra.runtime.errors import RewardError


def reward_value(value: Any, giver: str, sample_id: str, remedy: str) -> float:
    """The number that user code gave as a reward: of Python, or a scalar of numpy or torch.

    Args:
        giver: what gave it; stands in the error, as do the others.

    Raises:
        RewardError: it is no finite number. A text is none, even one that `float` can read.
    """
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:  # noqa: BLE001 -- `__float__` of anything; torch's raises RuntimeError
        number = math.nan
    if not math.isfinite(number):
        shown = reprlib.repr(value)
        raise RewardError(f"{giver} returned {shown} for sample {sample_id}; {remedy}")
    return number
