"""Tells user code that always blocks its process from that which does for some prompts. Pure.

Such a prompt is dropped, and others get done in between.
"""

from __future__ import annotations

from typing import Final

_MAX_PROMPTS: Final = 3
"""More: each costs `rollout.block_limit_s` and a start of the process, once more where it is tried
again. Fewer: two bad prompts that happen to come together end a run that could go on."""


class BlockedInARow:
    """Ends of rollout actors by calls of one kind that blocked, since one of the kind returned."""

    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._num_ends = 0

    def on_done(self) -> None:
        self._groups.clear()
        self._num_ends = 0

    def on_blocked(self, group_id: str) -> str:
        """A call for that group did. How often it has been in all, if too often; else ""."""
        self._groups.add(group_id)
        self._num_ends += 1
        if len(self._groups) < _MAX_PROMPTS:
            return ""
        return (
            f"that ended {self._num_ends} processes in a row, for {len(self._groups)} prompts, "
            "and nothing got done in between"
        )
