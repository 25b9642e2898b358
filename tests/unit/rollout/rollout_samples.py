"""Builders shared by the rollout tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.prompts import Prompt


def make_trajectory(
    prompt: Sequence[int] = (1, 2),
    *,
    sample_id: str = "e0/p/0",
    seed: int = 0,
    budget: int = 100,
    max_context_len: int = 1000,
) -> Trajectory:
    tokens = np.asarray(prompt, np.int32)
    return Trajectory(
        sample_id,
        Prompt("p", "text", tokens, {}),
        seed,
        budget=budget,
        max_context_len=max_context_len,
    )


def arrays(
    tokens: Sequence[int], logprob: float = -1.0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """A run's tokens and logprobs."""
    return np.asarray(tokens, np.int32), np.full(len(tokens), logprob, np.float32)
