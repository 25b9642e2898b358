"""Checks a reward, whether an agent loop or a reward function returned it."""

from __future__ import annotations

import math
import reprlib
from typing import Any, Final

import numpy as np

from umbra.runtime.errors import RewardError

REWARD_LIMIT: Final = float(np.finfo(np.float32).max) / 2
"""Largest absolute reward. Beyond it, an advantage could exceed float32."""


def reward_value(value: Any, giver: str, sample_id: str, remedy: str) -> float:
    """Converts a reward from user code: a number of Python, or a scalar of numpy or torch. Raises
    RewardError for text, and for a number that is not finite or beyond REWARD_LIMIT."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:  # an int whose digits may be too many to show
        raise _too_large("a number beyond 1.8e308", giver, sample_id) from None
    except Exception:  # noqa: BLE001 -- `__float__` of anything; torch's raises RuntimeError
        number = math.nan
    if not math.isfinite(number):
        shown = reprlib.repr(value)
        raise RewardError(f"{giver} returned {shown} for sample {sample_id}; {remedy}")
    if abs(number) > REWARD_LIMIT:
        raise _too_large(f"{number:.4g}", giver, sample_id)
    return number


def _too_large(shown: str, giver: str, sample_id: str) -> RewardError:
    return RewardError(
        f"{giver} returned {shown} for sample {sample_id}; rewards must lie within "
        f"{REWARD_LIMIT:.4g} of zero, so that float32 holds their advantages: scale them down"
    )
