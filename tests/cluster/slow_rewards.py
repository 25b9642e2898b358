"""The quickstart's reward, made so slow that a step of 32 groups takes a second or more."""

from __future__ import annotations

import time
from collections.abc import Sequence

from umbra.trainer.quickstart.quickstart_task import reward

GROUP_S = 1 / 32


def slow(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object
) -> list[float]:
    time.sleep(GROUP_S)
    return reward(prompts, completions, answer)
