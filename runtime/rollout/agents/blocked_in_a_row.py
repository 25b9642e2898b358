from __future__ import annotations

from typing import Final

_MAX_PROMPTS: Final = 3
"""Larger costs more: each prompt takes `rollout.block_limit_s` and a restart of the process, twice
if it is retried. Smaller ends a run when a few bad prompts happen to come together."""


class BlockedInARow:
    """Counts how often calls of one kind ended their worker by blocking, since one returned. Pure.
    A prompt that blocks is dropped, and calls for other prompts return in between."""

    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._num_ends = 0

    def on_done(self) -> None:
        self._groups.clear()
        self._num_ends = 0

    def on_blocked(self, group_id: str) -> str:
        """Counts a blocked call; returns the counts if there were too many in a row, else ""."""
        self._groups.add(group_id)
        self._num_ends += 1
        if len(self._groups) < _MAX_PROMPTS:
            return ""
        return (
            f"that ended {self._num_ends} processes in a row, for {len(self._groups)} prompts, "
            "and no other call returned in between"
        )
