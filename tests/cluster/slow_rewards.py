"""The quickstart's reward, made so slow that a step of 32 groups takes a second or more."""

from __future__ import annotations

import time
from typing import Any

from umbra.trainer.quickstart.quickstart_task import reward

_GROUP_S = 1 / 32


def slow(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: list[Any]
) -> list[float]:
    time.sleep(_GROUP_S)
    return reward(prompts, completions, answer=answer)
