"""A few samples of an evaluation, for people: those with the lowest and the highest rewards.

They are part of the evaluation's outcome, which every rank gets and the ledger keeps, so their size
is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.dispatch.trajectory import Trajectory

_NUM_EACH: Final = 3
"""Worst samples, and as many best. More are too many to read; fewer do not show what varies."""
_MAX_TOKENS: Final = 1024
"""Tokens of a prompt and of a completion. More bloat every rank's answer; fewer cut texts."""


def worst_and_best(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The samples as plain data, the lowest reward first. All groups must have been scored."""
    samples = [sample for group in groups for sample in group.trajectories]
    samples.sort(key=lambda sample: float(sample.reward or 0.0))
    if len(samples) > 2 * _NUM_EACH:
        samples = [*samples[:_NUM_EACH], *samples[-_NUM_EACH:]]
    return [_plain(sample) for sample in samples]


def _plain(sample: Trajectory) -> dict[str, Any]:
    segments = [
        [part.start, min(part.stop, _MAX_TOKENS), part.version]
        for part in sample.segments()
        if part.start < _MAX_TOKENS
    ]
    return {
        "prompt_id": sample.prompt.prompt_id,
        "prompt_tokens": sample.prompt_tokens[-_MAX_TOKENS:].tolist(),
        "num_prompt_tokens": len(sample.prompt_tokens),
        "tokens": sample.tokens[:_MAX_TOKENS].tolist(),
        "num_tokens": sample.completion_len,
        "segments": segments,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
    }
