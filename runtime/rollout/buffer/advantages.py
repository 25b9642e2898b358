"""Advantages of a group of trajectories of one prompt. G: group size."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.rollout_config import ADVANTAGE_KINDS

# Keeps the quotient finite. Larger shrinks the advantages of groups that hardly differ; smaller
# than float32 rounding of the rewards would blow rounding noise up to full size.
_STD_FLOOR: Final = 1e-4

REWARD_LIMIT: Final = float(np.finfo(np.float32).max) / 2
"""Of a reward's size. Beyond it the difference of two, and so an advantage, may be infinite."""


def group_advantages(rewards: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Advantages of one group, [G] float32 from rewards [G].

    Finite where no reward is beyond REWARD_LIMIT.
    "grpo": (r - mean) / (std + 1e-4), std over the G rewards (ddof 0); arXiv:2402.03300, 4.1.2.
    "dr_grpo": r - mean, which does not favour prompts of little variance; arXiv:2503.20783.
    Equal rewards give zeros exactly: such a group carries no signal.
    """
    wide = rewards.astype(np.float64)
    if wide.size == 0 or (wide == wide[0]).all():
        return np.zeros(wide.size, np.float32)
    centred: NDArray[np.float64] = wide - wide.mean()
    match kind:
        case "grpo":
            return np.asarray(centred / (wide.std() + _STD_FLOOR), np.float32)
        case "dr_grpo":
            return np.asarray(centred, np.float32)
        case _:
            raise ValueError(f"advantage {kind!r} is not one of {', '.join(ADVANTAGE_KINDS)}")
